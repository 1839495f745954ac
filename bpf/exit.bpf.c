// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "memory.bpf.h"
#include "pace.bpf.c"
#include "process.bpf.h"
#include "quota.bpf.c"
#include "turn.bpf.c"
#include "wait.bpf.c"

/*
 * A dying thread. Runs before the kernel closes the process's files, and detaching our own probes takes long: so when
 * the agent or the guardian dies, stopping ends here, first.
 */
static __always_inline void end_lease(struct control *control, const struct process_id *id)
{
	if (id->tgid != control->agent_tgid && id->tgid != control->guardian_tgid)
		return;
	control->lease_until_ns = 0;
	if (id->tgid == control->agent_tgid)
		post_wake(&(struct wake){.kind = PAUSE_AGENT_EXIT, .process = *id});
	else
		post_event(EVENT_GUARDIAN_EXIT, 0, id);
}

/* It may die inside a call that never returns. */
static __always_inline void forget_thread(__u64 tid)
{
	bpf_map_delete_elem(&context_stacks, &tid);
	bpf_map_delete_elem(&freeings, &tid);
	settle_charge(tid);
#pragma unroll
	for (__u32 role = CALL_MEMORY; role < CALL_ROLES; role++) {
		struct call_key key = {.pid_tgid = tid, .role = role};

		bpf_map_delete_elem(&calls, &key);
	}
}

/* The thread's part in what gates count ends with it. */
static __always_inline void leave_gates(struct process *process)
{
	struct thread *thread = this_thread();

	if (!thread)
		return;
	leave_gate(thread);
	if (!process) /* of threads that die at once each may be the last, and one was first */
		return;
	if (end_own(process, thread, bpf_ktime_get_ns()) == 1)
		abandon_request(process); /* whatever is launched next begins anew: no thread will wait for this */
}

/* The leader may be over long before the others, and usually is a moment before them. */
static __always_inline int is_last_thread(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return BPF_CORE_READ(task, signal, live.counter) <= 0;
}

SEC("raw_tp/sched_process_fork")
int process_fork(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)ctx->args[1];
	struct process_id parent = this_process(), child = {.tgid = BPF_CORE_READ(task, tgid)};

	if (child.tgid == parent.tgid)
		return 0; /* a thread */
	child.start_ticks = BPF_CORE_READ(task, start_boottime) / NS_PER_TICK;
	inherit_rule(&parent, &child);
	return 0;
}

SEC("raw_tp/sched_process_exit")
int process_exit(void *ctx)
{
	__u64 tid = bpf_get_current_pid_tgid();
	struct process_id id = this_process();
	struct control *control = get_control();
	struct process *process;

	if (control && (__u32)tid == tid >> 32)
		end_lease(control, &id);
	if (is_last_thread())
		bpf_map_delete_elem(&payers, &id);
	process = bpf_map_lookup_elem(&processes, &id);
	leave_gates(process);
	settle_charge(tid);
	if (!process && !this_stack())
		return 0; /* as nearly every thread of the node */
	forget_thread(tid);
	if (process && is_last_thread()) { /* threads that die at once may each be: who deletes it speaks for all */
		close_all_gates(process, bpf_ktime_get_ns());
		leave_turns(&id, process);
		if (!bpf_map_delete_elem(&processes, &id))
			post_event(EVENT_PROCESS_EXIT, 0, &id);
	}
	return 0;
}

static long forget_context(void *map, struct context_key *key, struct context *context, struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

static long forget_context_memory(void *map, struct context_key *key, struct context_memory *sums,
				  struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

static long forget_uuid(void *map, struct ordinal_key *key, struct uuid *uuid, struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

static long forget_bus_id(void *map, struct ordinal_key *key, struct bus_id *bus, struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

static long forget_mapping(void *map, struct mapping_key *key, struct mapping *mapping, struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

/* Of graphs or of captures. */
static long forget_handle(void *map, struct graph_key *key, struct graph *graph, struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

static long forget_node(void *map, struct node_key *key, struct node *node, struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

static long forget_graph_memory(void *map, struct graph_key *key, struct graph_memory *memory, struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

/* Another program in the same process: contexts, memory and numbering went with the old one, and so did its threads. */
SEC("raw_tp/sched_process_exec")
int process_exec(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 tid = bpf_get_current_pid_tgid();
	__u64 before = tid >> 32 << 32 | (__u32)ctx->args[1]; /* whichever thread does it becomes the leader */
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);

	if (!process && !bpf_map_lookup_elem(&tenant_of, &id)) /* it may be known from an earlier agent alone */
		return 0;
	if (process) {
		leave_gates(process);
		close_all_gates(process, bpf_ktime_get_ns());
		abandon_request(process);
	}
	remove_allocations(&id);
	forget_thread(before);
	bpf_for_each_map_elem(&context_memories, forget_context_memory, &id, 0);
	bpf_for_each_map_elem(&mappings, forget_mapping, &id, 0);
	bpf_for_each_map_elem(&contexts, forget_context, &id, 0);
	bpf_for_each_map_elem(&uuids, forget_uuid, &id, 0);
	bpf_for_each_map_elem(&bus_ids, forget_bus_id, &id, 0);
	bpf_for_each_map_elem(&graphs, forget_handle, &id, 0);
	bpf_for_each_map_elem(&nodes, forget_node, &id, 0);
	bpf_for_each_map_elem(&graph_memories, forget_graph_memory, &id, 0);
	bpf_for_each_map_elem(&captures, forget_handle, &id, 0);
	forget_thread(tid);
	bpf_task_storage_delete(&threads, bpf_get_current_task_btf());
	bpf_map_delete_elem(&processes, &id);
	if (take_credit(LOST_EVENT))
		post_event(EVENT_PROCESS_EXEC, 0, &id);
	return 0;
}
