// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "memory.bpf.h"
#include "pace.bpf.c"
#include "process.bpf.h"

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
		post_pause(&(struct pause){.kind = PAUSE_AGENT_EXIT, .process = *id});
	else
		post_event(EVENT_GUARDIAN_EXIT, 0, id);
}

/* It may die inside a call that never returns. */
static __always_inline void forget_thread(__u64 tid)
{
	bpf_map_delete_elem(&threads, &tid);
	bpf_map_delete_elem(&context_stacks, &tid);
	bpf_map_delete_elem(&freeings, &tid);
#pragma unroll
	for (__u32 role = CALL_MEMORY; role < CALL_ROLES; role++) {
		struct call_key key = {.pid_tgid = tid, .role = role};

		bpf_map_delete_elem(&calls, &key);
	}
}

/*
 * A process ends with the last of its threads, which need not be its first. While several die at once each may see that
 * none lives, so whoever is here first speaks for all: what it takes, the others do not find.
 */
static __always_inline int is_over(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return BPF_CORE_READ(task, signal, live.counter) <= 0;
}

/* Its requests, all of them, do not keep a device busy any more. */
static __always_inline void drop_requests(const struct process_id *id, struct process *process)
{
	struct rule *rule = bpf_map_lookup_elem(&rules, id);
	__s64 open = __sync_lock_test_and_set(&process->open, 0);

	if (rule && rule->role == ROLE_ONLINE)
		close_gate_requests(process->slot, open, bpf_ktime_get_ns());
}

static __always_inline void drop_request(const struct process_id *id, struct process *process)
{
	struct rule *rule = bpf_map_lookup_elem(&rules, id);

	if (__sync_fetch_and_add(&process->open, -1) > 0 && rule && rule->role == ROLE_ONLINE)
		close_gate_requests(process->slot, 1, bpf_ktime_get_ns());
}

SEC("raw_tp/sched_process_exit")
int process_exit(void *ctx)
{
	__u64 tid = bpf_get_current_pid_tgid();
	struct process_id id = this_process();
	struct control *control = get_control();
	struct thread *thread = bpf_map_lookup_elem(&threads, &tid);
	struct process *process;

	if (control && (__u32)tid == tid >> 32)
		end_lease(control, &id);
	if (thread)
		leave_gate(thread);
	process = bpf_map_lookup_elem(&processes, &id);
	if (process && thread && thread->open && thread->epoch == process->epoch)
		drop_request(&id, process);
	if (!process && !thread && !bpf_map_lookup_elem(&context_stacks, &tid))
		return 0; /* as nearly every thread of the node */
	forget_thread(tid);
	if (process && is_over()) {
		drop_requests(&id, process);
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

static long forget_uuid(void *map, struct ordinal_key *key, struct uuid *uuid, struct process_id *id)
{
	if (key->process.tgid == id->tgid && key->process.start_ticks == id->start_ticks)
		bpf_map_delete_elem(map, key);
	return 0;
}

static long forget_owner(void *map, struct owner_key *key, __u32 *library, struct process_id *id)
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
	__u32 before = ctx->args[1]; /* its thread id, until it took the first thread's */
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);

	if (!process)
		return 0;
	drop_requests(&id, process);
	remove_allocations(&id, 0);
	bpf_for_each_map_elem(&contexts, forget_context, &id, 0);
	bpf_for_each_map_elem(&uuids, forget_uuid, &id, 0);
	bpf_for_each_map_elem(&owners, forget_owner, &id, 0);
	forget_thread(tid);
	forget_thread((tid & ~0xffffffffull) | before);
	bpf_map_delete_elem(&processes, &id);
	post_event(EVENT_PROCESS_EXEC, 0, &id);
	return 0;
}
