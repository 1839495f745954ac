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
#include "gate.bpf.h"
#include "graph.h"
#include "launch.h"
#include "mapping.h"
#include "memory.h"
#include "pace.h"
#include "pcie.h"
#include "probe.bpf.h"
#include "quota.h"
#include "stream.h"
#include "tenant.h"
#include "turn.h"
#include "wait.h"

#define SIGSTOP 19
#define NS_PER_TICK 10000000ull /* USER_HZ is 100 on every architecture that we build for */
#define PPM 1000000ull

#define CO_RE __attribute__((preserve_access_index))

/* The fields that identify a process and its cgroups; CO-RE finds them in the running kernel's types. */
struct css_set;
struct atomic_count {
	int counter;
};
struct signal_struct {
	struct atomic_count live; /* threads that have not begun to exit */
} CO_RE;
struct inode;
struct file {
	struct inode *f_inode;
} CO_RE;
struct vm_area_struct {
	struct file *vm_file;
} CO_RE;
struct mm_struct {
	unsigned long env_start, env_end;
} CO_RE;
struct task_struct {
	struct task_struct *group_leader;
	int tgid;
	struct mm_struct *mm;
	struct signal_struct *signal;
	__u64 start_boottime; /* Linux 5.5: was real_start_time */
	struct css_set *cgroups;
} CO_RE;

#define BOUNDED_HASH(name, key_type, value_type, entries)                                                              \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_HASH);                                                                       \
		__uint(map_flags, BPF_F_NO_PREALLOC);                                                                  \
		__uint(max_entries, entries);                                                                          \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

#define NO_LIBRARY (~0u)
#define LIBRARIES 65536 /* whatever a cookie can name */

/* State of a process between two drained waits. Private to the kernel side. */
struct process {
	__u64 first_seen_ns;
	__u64 start_ns; /* first launch since everything was drained; 0: nothing is outstanding */
	__u64 last_launch_ns;
	__u64 busy_mark_ns; /* its gate's busy total at start_ns */
	__u64 launches; /* since start_ns */
	__u64 charged_ns;
	__u64 pauses_mark;
	/*
	 * Low half: threads with launches that they have not waited for. High half: the epoch, +1 when a wait drains every
	 * thread's work. One word, so that of two waits that end one request only one does.
	 */
	__u64 requests;
	__u32 slot; /* of the latest launch */
	__u32 inherits; /* it has a payer */
	__u32 copied; /* 1 + slot of its latest copy, if it is online and may still be under way; 0: none is */
	__u32 _pad;
	__s32 gated[SLOTS]; /* requests of this epoch that are counted in each gate */
	__s64 captures; /* streams that are being captured */
	__u64 in_turns; /* it is periodic: its request may have a turn */
	struct queued_streams streams; /* since start_ns */
	struct delivered_function functions[DELIVERED_FUNCTIONS]; /* launched since start_ns */
};

/* The last call of a thread that was counted, and the library whose probe fired for it a second time. */
struct last_entry {
	__u64 address, stack;
	__u32 symbol, library, second;
};

/* One thread: what it is, and its own request. */
struct thread {
	struct process_id process; /* tgid 0: not looked up yet */
	struct last_entry last;
	__u32 device; /* 1 + that of the context on top of its stack; 0: look there */
	struct rule rule; /* as it was … */
	__u64 rule_ns; /* … then … */
	__u64 rules; /* … under this number of struct control */
	__u32 has_rule;
	__u64 start_ns;
	__u64 wait_ns; /* entry of the wait it is in; 0: in none */
	__u64 wait_busy_mark_ns;
	__u64 wait_queued_ns;
	__u32 epoch;
	__u16 open;
	__u16 gates; /* one bit for each slot whose gate counts its request: those that it has launched on */
	__u16 in_gates; /* … whose gate counts its wait */
	__u16 _pad[3];
	__u64 spins; /* its wait is a loop of queries */
	struct awaited awaited; /* by the wait that it is in, or the latest query */
	struct queued_streams streams; /* of its request */
	__u64 stopped_ns; /* at_ns of the stop that its latest launch ran into; 0: it did not */
};

/* A call between its entry and its return. */
struct call {
	__u64 a;
	__u64 b;
	__u64 c;
	__u64 d;
	__u64 stream;
	__u64 cookie;
};

struct call_key {
	__u64 pid_tgid;
	__u32 role;
	__u32 _pad;
};

enum call_role {
	CALL_MEMORY = 1,
	CALL_CONTEXT,
	CALL_GRAPH,
	CALL_COPY,
	CALL_NAME,
	CALL_MAPPING,
	CALL_STREAM,
	CALL_ROLES
};

/* A free between its entry and its return. */
struct freeing {
	struct allocation_key key;
	struct allocation allocation;
	__u64 is_shared; /* other handles or mappings keep it: nothing was taken out */
};

BOUNDED_HASH(processes, struct process_id, struct process, 16384);
/* With the task, so that no thread can take the place of another's; only uprobes touch it, and these may allocate. */
struct {
	__uint(type, BPF_MAP_TYPE_TASK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct thread);
} threads SEC(".maps");
BOUNDED_HASH(context_stacks, __u64, struct context_stack, 16384); /* by thread */
BOUNDED_HASH(freeings, __u64, struct freeing, 16384);
BOUNDED_HASH(calls, struct call_key, struct call, 65536); /* four for each of `context_stacks` */
BOUNDED_HASH(tenants, __u64, struct tenant, 512);
BOUNDED_HASH(tenant_losses, __u64, struct tenant_loss, 512);
BOUNDED_HASH(tenant_of, struct process_id, __u64, 16384);
BOUNDED_HASH(launches, struct launch_key, struct launch_value, 65536);
BOUNDED_HASH(other_launches, struct launch_key, struct launch_value, 8192); /* one per process and device */
BOUNDED_HASH(memory, struct memory_key, struct memory_value, 8192);
BOUNDED_HASH(allocations, struct allocation_key, struct allocation, 98304);
BOUNDED_HASH(context_memories, struct context_key, struct context_memory, 8192);
BOUNDED_HASH(mappings, struct mapping_key, struct mapping, 32768);
BOUNDED_HASH(copies, struct copy_key, struct copy_value, 16384);
BOUNDED_HASH(latencies, struct process_id, struct latency, 2048);
BOUNDED_HASH(delivered, struct process_id, struct deliveries, 4096);
BOUNDED_HASH(contexts, struct context_key, struct context, 8192);
/* Handles that no call need end: the agent deletes the oldest of a tenant that has many, and those of the dead. */
BOUNDED_HASH(uuids, struct ordinal_key, struct uuid, 8192);
BOUNDED_HASH(bus_ids, struct ordinal_key, struct bus_id, 8192);
BOUNDED_HASH(graphs, struct graph_key, struct graph, 16384);
BOUNDED_HASH(nodes, struct node_key, struct node, 8192);
BOUNDED_HASH(graph_memories, struct graph_key, struct graph_memory, 8192);
BOUNDED_HASH(captures, struct graph_key, struct graph, 8192);
BOUNDED_HASH(joins, struct graph_key, struct joined, 16384);
BOUNDED_HASH(recorded_events, struct graph_key, struct event_record, 16384);
BOUNDED_HASH(non_blocking, struct graph_key, struct non_blocking, 16384);
BOUNDED_HASH(rules, struct process_id, struct rule, 12288); /* online ones are written first */
BOUNDED_HASH(paces, struct process_id, struct pace, 12288);
BOUNDED_HASH(resumes, struct process_id, struct resume, 12288);
BOUNDED_HASH(payers, struct process_id, struct payer, 12288);
BOUNDED_HASH(stops, struct process_id, struct pause, 12288); /* without a place a launch passes */
BOUNDED_HASH(holding, struct process_id, __u64, 4096); /* records of held allocations; deleted as in `stops` */
BOUNDED_HASH(memory_rules, struct process_id, struct memory_rule, 4096);
BOUNDED_HASH(quotas, struct quota_key, struct quota, 1024);
BOUNDED_HASH(quota_uses, struct quota_key, struct quota_use, 4096);
BOUNDED_HASH(charges, __u64, struct charge, 16384); /* by thread, of those in `context_stacks` */
BOUNDED_HASH(returns, __u64, __s64, 65536); /* cookie → from the function to a return instruction, in bytes */
/* Library → the file that it is in, as the kernel's inode; 0: not known yet, or not known from here. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, LIBRARIES);
	__type(key, __u32);
	__type(value, __u64);
} files SEC(".maps");
BOUNDED_HASH(periodics, struct process_id, struct periodic, 1024);
SHARED_ARRAY(links, struct link, LINKS);
SHARED_ARRAY(turns, struct turn, SLOTS);
RING(events, 1024 * 1024);
RING(names, 2 * 1024 * 1024);

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, LOST_REASONS);
	__type(key, __u32);
	__type(value, __u64);
} lost SEC(".maps");

/* SMs of each device, written by the agent; 0 where they differ or are not known. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, __u32);
} sm_counts SEC(".maps");

/* What a tenant has at first, written by the agent. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct tenant);
} newcomer SEC(".maps");

/* Calls of each symbol, in all libraries. */
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, MOST_SYMBOLS);
	__type(key, __u32);
	__type(value, __u64);
} hits SEC(".maps");

/* Makes clang describe the ring buffers' records, which no map names, so that user space can check them too. */
const struct event *described_event SEC(".data.described");
const struct wake *described_wake SEC(".data.described");
const struct held *described_held SEC(".data.described");
const struct seen *described_seen SEC(".data.described");
const struct name *described_name SEC(".data.described");

/* Zeroes that do not fit the stack. */
struct blank {
	struct latency latency;
	struct deliveries deliveries;
	struct process process;
	struct context_stack context_stack;
	struct pace pace;
	struct pause pause;
	struct periodic periodic;
	struct graph graph;
	struct node node;
	struct tenant_loss tenant_loss;
	struct memory_value memory;
	struct context_memory context_memory;
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

static __always_inline void count_lost_wake(void)
{
	count_lost(LOST_EVENT);
}

/* Arguments beyond the fifth: in registers up to the sixth (x86-64) or the eighth (arm64), then on the stack. */
static __always_inline __u64 stack_argument(struct pt_regs *ctx, __u32 offset)
{
	__u64 value = 0;

	if (bpf_probe_read_user(&value, sizeof(value), (void *)(PT_REGS_SP(ctx) + offset)))
		count_lost(LOST_USER_READ);
	return value;
}

#if defined(__TARGET_ARCH_x86)
#define ARGUMENT_6(ctx) ((ctx)->r9)
#define ARGUMENT_7(ctx) stack_argument(ctx, 8) /* above the return address */
#define ARGUMENT_8(ctx) stack_argument(ctx, 16)
#define ARGUMENT_9(ctx) stack_argument(ctx, 24)
#elif defined(__TARGET_ARCH_arm64)
#define ARGUMENT_6(ctx) (((struct user_pt_regs *)(ctx))->regs[5])
#define ARGUMENT_7(ctx) (((struct user_pt_regs *)(ctx))->regs[6])
#define ARGUMENT_8(ctx) (((struct user_pt_regs *)(ctx))->regs[7])
#define ARGUMENT_9(ctx) stack_argument(ctx, 0)
#endif

/* The seventh to the ninth, in one read where they are on the stack. */
struct last_arguments {
	__u64 seventh, eighth, ninth;
};

static __always_inline struct last_arguments read_last_arguments(struct pt_regs *ctx)
{
	struct last_arguments last = {};

#if defined(__TARGET_ARCH_x86)
	if (bpf_probe_read_user(&last, sizeof(last), (void *)(PT_REGS_SP(ctx) + 8)))
		count_lost(LOST_USER_READ);
#else
	last.seventh = ARGUMENT_7(ctx);
	last.eighth = ARGUMENT_8(ctx);
	last.ninth = ARGUMENT_9(ctx);
#endif
	return last;
}

__noinline int take_credit(__u32 reason); /* tenant.bpf.h */
__noinline int give_credit(__u32 reason);

static __always_inline struct context_stack *own_stack(void);

/* Remembers a call's arguments until its return. */
static __always_inline void keep_call(__u32 role, const struct call *call)
{
	struct call_key key = {.pid_tgid = bpf_get_current_pid_tgid(), .role = role};

	if (!own_stack() || bpf_map_update_elem(&calls, &key, call, BPF_ANY))
		count_lost(LOST_CALL);
}

/* Takes them back: 0 when there are none. */
static __always_inline int take_call(__u32 role, struct call *call)
{
	struct call_key key = {.pid_tgid = bpf_get_current_pid_tgid(), .role = role};
	struct call *kept = bpf_map_lookup_elem(&calls, &key);

	if (!kept)
		return 0;
	*call = *kept;
	bpf_map_delete_elem(&calls, &key);
	return 1;
}

/* Of the register only 32 bits are the CUresult. */
static __always_inline int succeeded(struct pt_regs *ctx)
{
	return (__u32)PT_REGS_RC(ctx) == 0;
}

/* What the call wrote where `address` points; 0 when that cannot be read. */
static __always_inline __u64 read_result(__u64 address)
{
	__u64 value = 0;

	if (bpf_probe_read_user(&value, sizeof(value), (void *)address))
		count_lost(LOST_USER_READ);
	return value;
}

static __always_inline struct process_id this_process(void)
{
	struct task_struct *task = (void *)bpf_get_current_task_btf();
	struct process_id id = {
		.tgid = bpf_get_current_pid_tgid() >> 32,
		.start_ticks = task->group_leader->start_boottime / NS_PER_TICK,
	};
	return id;
}

/* What is known of this thread, or NULL. */
static __always_inline struct thread *this_thread(void)
{
	return bpf_task_storage_get(&threads, bpf_get_current_task_btf(), NULL, 0);
}

/* The same, known from now on; NULL: the kernel has no memory for it. */
static __always_inline struct thread *own_thread(void)
{
	struct thread *thread =
		bpf_task_storage_get(&threads, bpf_get_current_task_btf(), NULL, BPF_LOCAL_STORAGE_GET_F_CREATE);

	if (!thread)
		count_lost(LOST_THREAD);
	return thread;
}

/* Of the thread that runs. It stays the same for the thread's life, also over an exec. */
static __always_inline struct process_id process_of(struct thread *thread)
{
	if (!thread)
		return this_process();
	if (!thread->process.tgid)
		thread->process = this_process();
	return thread->process;
}

/* The entry of `map` at `key`, created as `initial` if there is none; NULL and one lost when the map is full. */
static __always_inline void *find_or_add(void *map, const void *key, const void *initial, __u32 reason)
{
	void *value = bpf_map_lookup_elem(map, key);

	if (value)
		return value;
	if (take_credit(reason))
		bpf_map_update_elem(map, key, initial,
				    BPF_NOEXIST); /* -EEXIST: another CPU was first, and that is fine */
	value = bpf_map_lookup_elem(map, key);
	if (!value)
		count_lost(reason);
	return value;
}

/* Creates or replaces; what is new takes of its tenant's credit. False, and one lost: there is no room. */
static __always_inline int put(void *map, const void *key, const void *value, __u32 reason)
{
	if ((bpf_map_lookup_elem(map, key) || take_credit(reason)) && !bpf_map_update_elem(map, key, value, BPF_ANY))
		return 1;
	count_lost(reason);
	return 0;
}

/* Deletes, and gives the credit back: a program may make and end thousands between two ticks. 0, or a negative error. */
static __always_inline long drop(void *map, const void *key, __u32 reason)
{
	long failed = bpf_map_delete_elem(map, key);

	if (!failed)
		give_credit(reason);
	return failed;
}

static __always_inline void count_hit(__u64 cookie)
{
	__u32 symbol = COOKIE_SYMBOL(cookie);
	__u64 *count = bpf_map_lookup_elem(&hits, &symbol);

	if (count)
		(*count)++;
}

struct found {
	__u64 inode;
};

static long note_file(struct task_struct *task, struct vm_area_struct *area, struct found *found)
{
	found->inode = (__u64)BPF_CORE_READ(area, vm_file, f_inode);
	return 0;
}

/* What is mapped at the address is the library's file. No inline function: it runs once for each. Since Linux 5.17. */
__noinline int learn_file(__u64 address, __u32 library)
{
	struct found found = {};

	if (!bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_find_vma))
		return 0;
	if (!bpf_find_vma(bpf_get_current_task_btf(), address, note_file, &found, 0) && found.inode)
		bpf_map_update_elem(&files, &library, &found.inode, BPF_ANY);
	return 0;
}

static __always_inline __u64 file_of(__u32 library, __u64 address)
{
	__u64 *file = bpf_map_lookup_elem(&files, &library);

	if (file && !*file)
		learn_file(address, library);
	return file ? *file : 0;
}

/* True where one of the files is not known yet, as before files were compared. */
static __always_inline int is_same_file(__u32 one, __u64 file)
{
	__u64 *other = bpf_map_lookup_elem(&files, &one);

	return !file || !other || !*other || *other == file;
}

/*
 * Counts the call; true when it is the second probe of one call. One file can be reached through several overlay mounts,
 * and a uprobe attached through each fires for all of them, one right after the other: the same thread, function,
 * instruction and stack pointer, the same file, and another library. A library that fires again without the first one
 * between is alone there: it was mapped over the other one.
 */
static __always_inline int is_duplicate_of(struct thread *thread, struct pt_regs *ctx, __u64 cookie)
{
	struct last_entry *last = thread ? &thread->last : NULL;
	__u64 address = PT_REGS_IP(ctx); /* not bpf_get_func_ip(): 0 for single uprobes before Linux 6.6 */
	__u64 stack = PT_REGS_SP(ctx);
	__u32 library = COOKIE_LIBRARY(cookie), symbol = COOKIE_SYMBOL(cookie);
	__u64 file = file_of(library, address);

	if (last && last->address == address && last->stack == stack && last->symbol == symbol &&
	    last->library != library && last->second != library && is_same_file(last->library, file)) {
		last->second = library;
		count_lost(LOST_DUPLICATE);
		return 1;
	}
	if (last)
		*last = (struct last_entry){address, stack, symbol, library, NO_LIBRARY};
	count_hit(cookie);
	return 0;
}

static __always_inline int is_duplicate(struct pt_regs *ctx, __u64 cookie)
{
	return is_duplicate_of(own_thread(), ctx, cookie);
}

/* Its stack of contexts, or NULL. */
static __always_inline struct context_stack *this_stack(void)
{
	__u64 tid = bpf_get_current_pid_tgid();

	return bpf_map_lookup_elem(&context_stacks, &tid);
}

/* The same, known from now on; NULL when there is no room. */
static __always_inline struct context_stack *own_stack(void)
{
	__u64 tid = bpf_get_current_pid_tgid();
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);

	return blank ? find_or_add(&context_stacks, &tid, &blank->context_stack, LOST_THREAD) : NULL;
}

static __always_inline void post_event(__u32 kind, __u32 library, const struct process_id *process)
{
	struct event event = {.kind = kind, .library = library, .process = *process, .at_ns = bpf_ktime_get_ns()};

	if (bpf_ringbuf_output(&events, &event, sizeof(event), 0))
		count_lost(LOST_EVENT);
}
