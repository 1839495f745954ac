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

SEC("raw_tp/sched_process_exit")
int process_exit(void *ctx)
{
	__u64 tid = bpf_get_current_pid_tgid();
	struct process_id id = this_process();
	struct control *control = get_control();
	int is_leader = (__u32)tid == tid >> 32;
	struct process *process;
	struct thread *thread;
	struct rule *rule;

	if (control && is_leader)
		end_lease(control, &id);
	process = bpf_map_lookup_elem(&processes, &id);
	if (!process)
		return 0;
	thread = bpf_map_lookup_elem(&threads, &tid);
	rule = bpf_map_lookup_elem(&rules, &id);
	if (thread && thread->in_gate)
		count_waiting(process->slot, -1);
	if (thread && thread->open && thread->epoch == process->epoch) {
		__sync_fetch_and_add(&process->open, -1);
		if (rule && rule->role == ROLE_ONLINE)
			close_gate_requests(process->slot, 1, bpf_ktime_get_ns());
	}
	forget_thread(tid);
	if (is_leader) {
		post_event(EVENT_PROCESS_EXIT, 0, &id);
		bpf_map_delete_elem(&processes, &id);
	}
	return 0;
}

/* Another program in the same process: contexts and memory went with the old one, threads other than this one too. */
SEC("raw_tp/sched_process_exec")
int process_exec(void *ctx)
{
	__u64 tid = bpf_get_current_pid_tgid();
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	struct rule *rule;

	if (!process)
		return 0;
	rule = bpf_map_lookup_elem(&rules, &id);
	if (rule && rule->role == ROLE_ONLINE)
		close_gate_requests(process->slot, process->open, bpf_ktime_get_ns());
	remove_allocations(&id, 0);
	forget_thread(tid);
	bpf_map_delete_elem(&processes, &id);
	post_event(EVENT_PROCESS_EXEC, 0, &id);
	return 0;
}
