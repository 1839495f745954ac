/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Keeping offline processes within their device memory, at their own allocations.
 *
 * What a container may have allocated on a device is a quota; what all offline containers together may have there is
 * another, of the group GROUP_ALL: the room that is kept for online ones. The kernel side knows what is live (the map
 * `memory`) and what is about to be, so two processes cannot both take the last room. User space sets the limits: what
 * contexts and rounding take (NVML's bytes less those of the calls) is its to subtract.
 *
 * An allocation that does not fit is denied (it returns CUDA_ERROR_OUT_OF_MEMORY and never runs), where the kernel lets
 * uprobes change registers, or held: its process is stopped before the driver sees the call, until there is room.
 * Neither happens after the lease of pace.h is over.
 */
#pragma once
#include "abi.h"
#include "memory.h"
#include "pace.h"

#define GROUP_ALL 0 /* every offline process on the device */
#define MOST_MEMBERS 64

#define MOST_HELD 8 /* records of one process's held allocations until it is resumed: more threads wait with these */

enum quota_flag {
	QUOTA_DENY = 1,
	QUOTA_HOLD = 2,
};

/* Written by the agent, one per offline process whose memory is bounded. */
struct memory_rule {
	__u32 group; /* its container's; never GROUP_ALL */
	__u32 flags;
	__u64 max_hold_ns;
	__u8 slots[ORDINALS]; /* as in struct rule */
	__u32 slot_unknown;
	__u32 _pad;
};

struct quota_key {
	__u32 group;
	__u32 slot;
};

/* Written by the agent. */
struct quota {
	__u64 limit_bytes; /* of what its processes have allocated by calls that the probes saw */
	__u64 other_bytes; /* of processes that are not among the members */
	__u32 count;
	__u32 _pad;
	struct memory_key members[MOST_MEMBERS];
};

/* Written by the probes. */
struct quota_use {
	__s64 pending_bytes; /* of calls that have not returned: those that are held, too */
	__u64 denied;
	__u64 held;
	__u64 for_room; /* denied or held for an online container's sake, not for the own quota's */
};

/* What a call that has not returned was charged for. */
struct charge {
	__u64 bytes; /* 0: given back */
	__u64 until_ns; /* it ends by itself then, returned or not */
	__u32 group;
	__u32 slot;
	__u32 takes_room; /* charged to GROUP_ALL, too */
	__u32 _pad;
};

/* Ring buffer `pauses`, kind PAUSE_HELD: a process was stopped at an allocation. */
struct held {
	__u32 kind;
	__u32 group;
	struct process_id process;
	__u32 slot;
	__u32 for_room;
	__u64 at_ns;
	__u64 bytes;
	__u64 max_hold_ns;
};
