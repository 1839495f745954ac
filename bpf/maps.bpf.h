// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/* Maps and the small functions that every concern uses. */
#pragma once
#include <linux/bpf.h>
#include <linux/ptrace.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "abi.h"
#include "context.h"
#include "copy.h"
#include "launch.h"
#include "memory.h"
#include "pace.h"
#include "wait.h"

#define SIGSTOP 19
#define NS_PER_TICK 10000000ull /* USER_HZ is 100 on every architecture that we build for */
#define PPM 1000000ull

/* The two fields that identify a process; CO-RE finds them in the running kernel's task_struct. */
struct task_struct {
	struct task_struct *group_leader;
	__u64 start_boottime; /* Linux 5.5: was real_start_time */
} __attribute__((preserve_access_index));

#define BOUNDED_HASH(name, key_type, value_type, entries)                                                              \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_HASH);                                                                       \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                                  \
		__uint(max_entries, entries);                                                                          \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

#define LRU_HASH(name, key_type, value_type, entries)                                                                  \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_LRU_HASH);                                                                   \
		__uint(max_entries, entries);                                                                          \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

#define SHARED_ARRAY(name, value_type, entries)                                                                        \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_ARRAY);                                                                      \
		__uint(map_flags, BPF_F_MMAPABLE);                                                                     \
		__uint(max_entries, entries);                                                                          \
		__type(key, __u32);                                                                                    \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

#define RING(name, bytes)                                                                                              \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_RINGBUF);                                                                    \
		__uint(max_entries, bytes);                                                                            \
	} name SEC(".maps")

/* State of a process between two drained waits. Private to the kernel side. */
struct process {
	__u64 first_seen_ns;
	__u64 start_ns; /* first launch since everything was drained; 0: nothing is outstanding */
	__u64 last_launch_ns;
	__u64 busy_mark_ns; /* its gate's busy total at start_ns */
	__u64 launches; /* since start_ns */
	__u64 charged_ns;
	__u64 pauses_mark;
	__s64 open; /* threads with launches that they have not waited for */
	__u32 epoch; /* +1 when a wait drains every thread's work */
	__u32 slot; /* of the latest launch */
};

/* One thread's own request. */
struct thread {
	__u64 start_ns;
	__u64 wait_ns; /* entry of the wait it is in; 0: in none */
	__u64 wait_busy_mark_ns;
	__u64 wait_queued_ns;
	__u32 epoch;
	__u16 open;
	__u16 in_gate; /* counted in its gate's in_wait */
};

/* A call between its entry and its return. */
struct call {
	__u64 a;
	__u64 b;
	__u64 c;
};

struct call_key {
	__u64 pid_tgid;
	__u32 role;
	__u32 _pad;
};

enum call_role { CALL_ALLOC = 1, CALL_FREE, CALL_CONTEXT };

struct owner_key {
	__u64 address; /* of the probed function in the process */
	struct process_id process;
};

BOUNDED_HASH(processes, struct process_id, struct process, 16384);
LRU_HASH(threads, __u64, struct thread, 16384);
LRU_HASH(calls, struct call_key, struct call, 16384);
LRU_HASH(owners, struct owner_key, __u32, 16384);
BOUNDED_HASH(launches, struct launch_key, struct launch_value, 65536);
BOUNDED_HASH(other_launches, struct launch_key, struct launch_value, 8192); /* one per process and device */
BOUNDED_HASH(memory, struct memory_key, struct memory_value, 8192);
BOUNDED_HASH(allocations, struct allocation_key, struct allocation, 131072);
BOUNDED_HASH(copies, struct copy_key, struct copy_value, 16384);
BOUNDED_HASH(latencies, struct process_id, struct latency, 4096);
BOUNDED_HASH(delivered, struct process_id, struct deliveries, 4096);
LRU_HASH(contexts, struct context_key, __u32, 16384);
LRU_HASH(current_context, __u64, struct context_stack, 16384);
BOUNDED_HASH(rules, struct process_id, struct rule, 8192);
BOUNDED_HASH(paces, struct process_id, struct pace, 8192);
BOUNDED_HASH(resumes, struct process_id, struct resume, 8192);
SHARED_ARRAY(gates, struct gate, SLOTS);
SHARED_ARRAY(controls, struct control, 1);
RING(events, 256 * 1024);
RING(pauses, 256 * 1024);

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LOST_REASONS);
	__type(key, __u32);
	__type(value, __u64);
} lost SEC(".maps");

/* Makes clang describe the ring buffers' records, which no map names, so that user space can check them too. */
const struct event *described_event SEC(".data.described");
const struct pause *described_pause SEC(".data.described");

/* Zeroes that do not fit the stack. */
struct blank {
	struct latency latency;
	struct deliveries deliveries;
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct blank);
} blanks SEC(".maps");

/* The first five arguments of the probed function. */
struct arguments {
	__u64 first, second, third, fourth, fifth;
};

/* Reads each once, here: loads that clang sinks into branches become a variable offset that the verifier refuses. */
static __always_inline struct arguments read_arguments(struct pt_regs *ctx)
{
	struct arguments arguments = {PT_REGS_PARM1(ctx), PT_REGS_PARM2(ctx), PT_REGS_PARM3(ctx), PT_REGS_PARM4(ctx),
				      PT_REGS_PARM5(ctx)};

	barrier_var(arguments.first);
	barrier_var(arguments.second);
	barrier_var(arguments.third);
	barrier_var(arguments.fourth);
	barrier_var(arguments.fifth);
	return arguments;
}

static __always_inline void count_lost(__u32 reason)
{
	__u64 *count = bpf_map_lookup_elem(&lost, &reason);

	if (count)
		(*count)++;
}

static __always_inline struct process_id this_process(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct process_id id = {
		.tgid = bpf_get_current_pid_tgid() >> 32,
		.start_ticks = BPF_CORE_READ(task, group_leader, start_boottime) / NS_PER_TICK,
	};
	return id;
}

/* The entry of `map` at `key`, created as `initial` if there is none; NULL and one lost when the map is full. */
static __always_inline void *find_or_add(void *map, const void *key, const void *initial, __u32 reason)
{
	void *value = bpf_map_lookup_elem(map, key);

	if (value)
		return value;
	bpf_map_update_elem(map, key, initial, BPF_NOEXIST); /* -EEXIST: another CPU was first, and that is fine */
	value = bpf_map_lookup_elem(map, key);
	if (!value)
		count_lost(reason);
	return value;
}

/*
 * True when another library's probe already owns this call. One file can be reached through several overlay mounts, and
 * a uprobe attached through each fires for all of them.
 */
static __always_inline int is_duplicate(struct pt_regs *ctx, __u64 cookie)
{
	/* not bpf_get_func_ip(), which answers 0 for single uprobes before Linux 6.6 */
	struct owner_key key = {.address = PT_REGS_IP(ctx), .process = this_process()};
	__u32 library = COOKIE_LIBRARY(cookie);
	__u32 *owner = bpf_map_lookup_elem(&owners, &key);

	if (!owner) {
		bpf_map_update_elem(&owners, &key, &library, BPF_NOEXIST);
		return 0;
	}
	if (*owner == library)
		return 0;
	count_lost(LOST_DUPLICATE);
	return 1;
}

static __always_inline void post_event(__u32 kind, __u32 library, const struct process_id *process)
{
	struct event event = {.kind = kind, .library = library, .process = *process, .at_ns = bpf_ktime_get_ns()};

	if (bpf_ringbuf_output(&events, &event, sizeof(event), 0))
		count_lost(LOST_EVENT);
}

static __always_inline struct process *find_process(const struct process_id *id, __u64 cookie)
{
	struct process initial = {};
	struct process *process = bpf_map_lookup_elem(&processes, id);

	if (process)
		return process;
	initial.first_seen_ns = bpf_ktime_get_ns();
	initial.slot = SLOT_NONE;
	process = find_or_add(&processes, id, &initial, LOST_PROCESS);
	if (process)
		post_event(EVENT_PROCESS_SEEN, COOKIE_LIBRARY(cookie), id);
	return process;
}
