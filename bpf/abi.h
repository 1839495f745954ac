/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What every concern shares with user space: identities, the attach cookie, and the count of what was lost.
 * agent/probes/abi.py mirrors these structs and checks each against the object's BTF when it loads.
 */
#pragma once

#ifndef __bpf__
#include <linux/types.h>
#endif

/* A process that a reused pid cannot be taken for: start_ticks is field 22 of /proc/PID/stat (1/100 s since boot). */
struct process_id {
	__u32 tgid;
	__u32 start_ticks;
};

/* The ordinal of a launch whose thread set its context before the probes were there. */
#define DEVICE_UNKNOWN 0xffffffffu

/* Attach cookie: library, what the symbol's arguments look like (enum shape), its stream, what it does, its number. */
#define COOKIE_LIBRARY(cookie) ((__u32)((cookie)&0xffff))
#define COOKIE_SHAPE(cookie) ((__u32)(((cookie) >> 16) & 0xff))
#define COOKIE_STREAM(cookie) ((__u32)(((cookie) >> 24) & 0xf)) /* place of the stream among the arguments; 0: none */
#define COOKIE_PER_THREAD(cookie) ((__u32)(((cookie) >> 28) & 1)) /* its default stream is the thread's own */
#define COOKIE_DETAIL(cookie) ((__u32)(((cookie) >> 32) & 0xfffff))
#define COOKIE_SYMBOL(cookie) ((__u32)((cookie) >> 52))

#define MOST_SYMBOLS 256 /* of agent/probes/symbols.py; index of the map `hits` */

/* Why something was not recorded; an index of the map `lost`. */
enum lost {
	LOST_LAUNCH_FUNCTION, /* `launches` full: counted in `other_launches` instead, without its function */
	LOST_LAUNCH, /* not even that: a launch is missing */
	LOST_PROCESS, /* `processes` full */
	LOST_THREAD, /* `context_stacks` full, or no memory for what is known of a thread */
	LOST_ALLOCATION, /* `allocations` full: live bytes are short, or may come to be */
	LOST_MEMORY, /* `memory` full */
	LOST_COPY, /* `copies` full */
	LOST_CALL, /* `calls` full: an entry without its return */
	LOST_LATENCY, /* `latencies` or `delivered` full */
	LOST_EVENT, /* a ring buffer was full */
	LOST_USER_READ, /* an argument in user memory could not be read */
	LOST_DUPLICATE, /* a second probe fired for one call: dropped on purpose */
	LOST_GRAPH, /* launch of a graph that was made before the probes were there: counted as one kernel */
	LOST_NAME, /* the ring `names` was full */
	LOST_BATCH, /* copies of a batch beyond the first MOST_OF_BATCH */
	LOST_QUOTA, /* `charges` or `quota_uses` full: an allocation that no quota saw */
	LOST_NODE, /* a node that is not known was changed: its graph counts as before */
	LOST_BOUNDS, /* an argument beyond what any device has: cut, or not booked (bounds.bpf.h) */
	LOST_ORDINAL, /* a device's number beyond MOST_ORDINALS: taken for unknown */
	LOST_CHARGE, /* an allocation that did not return in time: it holds no room any more */
	LOST_CONTEXT, /* its tenant has no room in `contexts`: launches there are on a device that is not known */
	LOST_MAPPING, /* … in `mappings`: physical memory may count as freed too early */
	LOST_CONTEXT_MEMORY, /* … in `context_memories`: what a context holds is freed by its own calls, not with it */
	LOST_NEW_GRAPH, /* … in `graphs` or `captures`: a graph counts as one kernel, what is captured as if it ran */
	LOST_GRAPH_MEMORY, /* … in `graph_memories`: what a graph frees is not taken off */
	LOST_STREAM, /* … in `joins` or `non_blocking` */
	LOST_RECORD, /* … in `recorded_events`: a wait for the event drains nothing */
	LOST_UUID, /* … in `uuids` or `bus_ids`: which device an ordinal means is read from the environment */
	LOST_PACE, /* `paces`, `stops` or `payers` full: an offline process runs that should have been held */
	LOST_REASONS,
};

/* Ring buffer `events` (for the agent). */
enum event_kind {
	EVENT_PROCESS_SEEN = 1,
	EVENT_PROCESS_EXIT,
	EVENT_GUARDIAN_EXIT,
	EVENT_PROCESS_EXEC, /* the same process, another program: what it held on the devices is gone */
};

struct event {
	__u32 kind;
	__u32 library;
	struct process_id process;
	__u64 at_ns;
};

#define CGROUP_LEVELS 6
#define CGROUP_NAME 96
#define COMMAND_NAME 16
#define VISIBLE_DEVICES 384 /* of CUDA_VISIBLE_DEVICES: 8 UUIDs and what lies between them need 327 */

/* The lowest parts of a cgroup's path, the innermost first; "" above the root. */
struct cgroup_path {
	char parts[CGROUP_LEVELS][CGROUP_NAME];
};

/* What is known of a process's environment: bits. */
enum environment {
	ENVIRONMENT_READ = 1, /* all of it: what is not there is not set */
	ENVIRONMENT_VISIBLE = 2, /* CUDA_VISIBLE_DEVICES is set */
	ENVIRONMENT_BUS_ORDER = 4, /* CUDA_DEVICE_ORDER is PCI_BUS_ID */
};

/* EVENT_PROCESS_SEEN: enough to say whose a process is that ends before its /proc can be read. */
struct seen {
	struct event event;
	__u32 uid;
	__u32 environment; /* enum environment */
	char command[COMMAND_NAME];
	char visible[VISIBLE_DEVICES]; /* CUDA_VISIBLE_DEVICES, if that is set */
	struct cgroup_path unified; /* cgroup v2 */
	struct cgroup_path legacy; /* cgroup v1, where the memory controller is */
};

/* Ring buffer `names` (for the agent): what a function handle is called. */
#define LONGEST_NAME 256

enum name_kind {
	NAME_FUNCTION = 1,
	NAME_ALIAS, /* `function` is the CUfunction of the CUkernel `other` */
};

struct name {
	__u32 kind;
	__u32 length; /* of text, with its NUL */
	struct process_id process;
	__u64 function;
	__u64 other;
	char text[LONGEST_NAME];
};
