/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What every concern shares with user space: identities, the attach cookie, and the count of what was lost.
 * agent/layout.py mirrors these structs and checks each against the object's BTF when it loads.
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

/* Attach cookie: which library, and what the symbol's arguments look like (enum shape) or do (role detail). */
#define COOKIE_LIBRARY(cookie) ((__u32)((cookie)&0xffff))
#define COOKIE_SHAPE(cookie) ((__u32)(((cookie) >> 16) & 0xffff))
#define COOKIE_DETAIL(cookie) ((__u32)((cookie) >> 32))

/* Why something was not recorded; an index of the map `lost`. */
enum lost {
	LOST_LAUNCH_FUNCTION, /* `launches` full: counted in `other_launches` instead, without its function */
	LOST_LAUNCH, /* not even that: a launch is missing */
	LOST_PROCESS, /* `processes` full */
	LOST_THREAD, /* `threads` full */
	LOST_ALLOCATION, /* `allocations` full: live bytes are short */
	LOST_MEMORY, /* `memory` full */
	LOST_COPY, /* `copies` full */
	LOST_CALL, /* `calls` full: an entry without its return */
	LOST_LATENCY, /* `latencies` full */
	LOST_EVENT, /* a ring buffer was full */
	LOST_USER_READ, /* an argument in user memory could not be read */
	LOST_DUPLICATE, /* a second probe fired for one call: dropped on purpose */
	LOST_REASONS,
};

/* Ring buffer `events` (for the agent). */
enum event_kind {
	EVENT_PROCESS_SEEN = 1,
	EVENT_PROCESS_EXIT,
	EVENT_GUARDIAN_EXIT,
};

struct event {
	__u32 kind;
	__u32 library;
	struct process_id process;
	__u64 at_ns;
};
