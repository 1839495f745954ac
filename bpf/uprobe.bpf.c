// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * An object of its own: loaded only while a policy has an SLO with the signal `uprobe`. The cookie is the target: a file
 * and a function. One file can be reached through several overlay mounts, and a uprobe attached through each fires in
 * all of them: so a process counts with one target only, the one that was attached for it.
 */
#include <linux/bpf.h>
#include <linux/ptrace.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "latency.bpf.h"
#include "probe.bpf.h"
#include "uprobe.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define MOST_NS (20ull * 60 * 1000000000) /* a call that takes longer is not waited for: the longest target is half */

#if defined(__TARGET_ARCH_x86)
#define RETURN_POPS 8 /* the return address */
#else
#define RETURN_POPS 0
#endif

/* A thread's outermost call between its entry and its return. */
struct inside {
	__u64 sp;
	__u64 at_ns;
	__u32 watch;
	__u32 target;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 8192);
	__type(key, __u32); /* tgid */
	__type(value, struct watched);
} wanted SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, __u64); /* tgid and tid */
	__type(value, struct inside);
} insides SEC(".maps");

/* By watch; made and taken away by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1024);
	__type(key, __u32);
	__type(value, struct latency);
} recorded SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, CALL_TALLIES);
	__type(key, __u32);
	__type(value, __u64);
} tallies SEC(".maps");

static __always_inline void tally(__u32 index)
{
	__u64 *count = bpf_map_lookup_elem(&tallies, &index);

	if (count)
		(*count)++;
}

/*
 * By the stack pointer, not by a count of entries: a call that an exception or longjmp ended has no return, and the
 * next one that begins as high on the stack shows it. Deeper on the stack is recursion, of which the outermost counts.
 */
PROBE_ALONE("uprobe", uprobe_enter)
{
	__u64 thread = bpf_get_current_pid_tgid(), now = bpf_ktime_get_ns();
	__u32 tgid = thread >> 32;
	struct watched *watched = bpf_map_lookup_elem(&wanted, &tgid);
	struct inside *before, inside = {.sp = PT_REGS_SP(ctx), .at_ns = now};

	if (!watched || watched->target != (__u32)bpf_get_attach_cookie(ctx))
		return 0;
	before = bpf_map_lookup_elem(&insides, &thread);
	if (before) {
		if (before->target == watched->target && inside.sp < before->sp && now - before->at_ns < MOST_NS)
			return 0;
		tally(CALL_ABANDONED);
	}
	inside.watch = watched->watch;
	inside.target = watched->target;
	if (bpf_map_update_elem(&insides, &thread, &inside, BPF_ANY))
		tally(CALL_FULL);
	return 0;
}

PROBE_ALONE("uretprobe", uprobe_return)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct inside *inside = bpf_map_lookup_elem(&insides, &thread);
	struct latency *latency;
	__u64 elapsed_ns;
	__u32 watch;

	if (!inside || inside->target != (__u32)bpf_get_attach_cookie(ctx) ||
	    PT_REGS_SP(ctx) != inside->sp + RETURN_POPS)
		return 0;
	elapsed_ns = bpf_ktime_get_ns() - inside->at_ns;
	watch = inside->watch;
	bpf_map_delete_elem(&insides, &thread);
	latency = bpf_map_lookup_elem(&recorded, &watch);
	if (latency)
		add_latency(latency, elapsed_ns);
	return 0;
}

/* Its pid may be another's next. */
SEC("raw_tp/sched_process_exit")
int uprobe_exit(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();
	__u32 tgid = thread >> 32;

	bpf_map_delete_elem(&insides, &thread);
	if ((__u32)thread == tgid)
		bpf_map_delete_elem(&wanted, &tgid);
	return 0;
}

/* Another program, on another stack. */
SEC("raw_tp/sched_process_exec")
int uprobe_exec(void *ctx)
{
	__u64 thread = bpf_get_current_pid_tgid();

	bpf_map_delete_elem(&insides, &thread);
	return 0;
}
