/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Slowing offline processes at their own launches.
 *
 * Each offline process has a virtual queue per device: a launch adds its estimated GPU time, time drains it at
 * `rate_ppm`, but not while an online request runs on the device. A launch that would fill it past max_queued_ns, or that
 * meets a running online request, stops its own process before the driver sees it. The guardian resumes it; the launch
 * that was stopped then goes through.
 *
 * Beside it there is the backlog: the same charges, drained at full rate. A drained wait proves the backlog gone, but
 * not that the share's rate has paid for the work: what it has not stays in the queue.
 *
 * Nothing is ever stopped after lease_until_ns, which the guardian renews while it and the agent live: when either
 * dies, the kernel stops stopping.
 */
#pragma once
#include "abi.h"

#define SLOTS 16 /* devices that can be controlled */
#define ORDINALS 16
#define SLOT_NONE 0xff

enum role {
	ROLE_NONE,
	ROLE_ONLINE,
	ROLE_OFFLINE,
	ROLE_PERIODIC, /* its requests take turns on a device: turn.h */
};

enum rule_flag {
	RULE_PACE = 1,
	RULE_GATE = 2,
	RULE_SOFT = 8, /* a running online request stops no process whose queue has room, unless requests wait for each
			  other; but queues do not drain meanwhile */
	RULE_BLOCKS = 4, /* launch_ns is what one block of a grid is charged, not one launch: TGS counts blocks */
	RULE_COPIES =
		16, /* its copies between host and device are paced, as pcie.h says; of an online process: waited for */
	RULE_SHORT = 32, /* an online process may copy on its devices: few offline copies may be under way */
	RULE_INHERITED = 64, /* of a stop: the rule is that of the process that forked it, so no ledger has this one */
};

/* Written by the agent, one per process that the policy names. */
struct rule {
	__u32 role;
	__u32 flags;
	__u64 rate_ppm; /* drain rate of the virtual queue: share × 10^6 */
	__u64 max_queued_ns;
	__u64 launch_ns; /* estimated GPU time of one launch of this process */
	__u64 max_pause_ns; /* longest single stop */
	__u64 floor_ppm; /* what is left to it whatever queue and gate say: the guardian lets that much pass */
	__u64 deadline_ns; /* of a periodic process: from the begin of a request, within which it is to end */
	__u8 slots[ORDINALS]; /* ordinal → slot of the device, SLOT_NONE where there is none */
	__u32 slot_unknown; /* for launches whose ordinal is unknown */
	__u32 group; /* its container's, from 1 … */
	__u32 weight; /* … and that one's part of a link: × WEIGHT_ONE of pcie.h */
	__u32 _pad;
};

/* A process's virtual queue on one device. */
struct queue {
	__u64 queued_ns; /* charged, and not paid back at rate_ppm yet */
	__u64 updated_ns;
	__u64 busy_mark_ns; /* busy_total of the slot at updated_ns */
	__u64 backlog_ns; /* believed to be on the GPU: drains at full rate */
	__u64 held_ns; /* the launch that was stopped: it gets there … */
	__u64 held_for_ns; /* … so long after updated_ns, or when more is heard of the process */
};

#define QUEUES (SLOTS + 1) /* the last one for launches on a device that is not known */

/* Written by the probes, one per offline process. */
struct pace {
	__u64 charged_ns; /* Σ estimates ever */
	__u64 pauses; /* ever */
	__u64 gate_pauses;
	__u64 passes; /* of struct resume, as far as they were taken */
	__u64 pass_left_ns; /* what may still be launched of the last one */
	__u64 foreign; /* how often it launched in a stop of ours: another process ended that, or a tracer swallowed it */
	__u64 copy_pauses; /* at copies; part of `pauses` */
	struct queue queues[QUEUES];
};

/* A process without a rule that descends from one with one: who is charged for it. Chains of short lives add up. */
struct payer {
	struct process_id process;
	__u64 seen_ns; /* when that one's rule was last seen */
	struct rule rule; /* as it was then: the process may be over */
};

/* Written by the guardian, one per process that it ever resumed. */
struct resume {
	__u64 passes; /* how often it was let through whatever queue and gate say … */
	__u64 pass_ns; /* … and how much it may launch then, with the launch that was stopped */
	__u64 stopped_at_ns; /* 0: not stopped by us now */
	__u64 paused_ns; /* Σ lengths of stops */
	__u64 copy_paused_ns; /* of those at copies */
	__u64 resumes;
};

/* One per device. */
struct gate {
	__s64 open; /* online requests running */
	__s64 in_wait; /* online threads inside a wait for them */
	__u64 busy_since_ns;
	__u64 busy_total_ns; /* up to the last time that it was free */
	__u64 last_online_ns;
	__u64 last_free_ns; /* when the last online request was over */
	__u64 waiting; /* processes stopped at this gate; written by the guardian */
	__u64 online_blocks; /* launched by online processes, ever */
	__u64 stretch_since_ns; /* since when requests have kept it without a gap worth the name */
	__u64 free_posted; /* PAUSE_FREE is in the ring; reset by the guardian */
	__u64 requests; /* how often an online request found it free or began to count again: each ended an idle gap */
	__s64 served; /* requests that have arrived at their service and are not answered, as far as a signal sees them */
	__u64 served_ns; /* since when there are any … */
	__u64 idle_ns; /* … and since when there were none before */
	__u64 trust; /* how surely a signal sees each request before it launches: TRUST_MOST at most */
	__u64 hasty; /* how often the next request comes before HASTY_NS have passed without one: of HASTY_ALWAYS */
};

/* A request that was seen before it launched adds one, one that was not takes some: one in 16 may come unseen. */
#define TRUST_MOST 64
#define TRUST_LOST 16
#define TRUST_LOST_IDLE 4 /* requests came and went, and launched nothing: one stretch in five may */
#define TRUSTED 32
#define HASTY_NS 500000ull
#define HASTY_ALWAYS 65536ull
#define HASTY_WEIGHT 32 /* of the past against the next one */
/* From arrivals, or from the end of the request before, to a launch: for so long they shut a gate. */
#define ANNOUNCED_NS 300000ull

/* One for all. */
struct control {
	__u64 lease_until_ns;
	__u64 hold_ns; /* an online request that neither launches nor waits for so long counts as over */
	__u64 heartbeat_ns; /* written by the agent at each decision */
	__u64 rules; /* another number whenever `rules` has changed; 0: changes are not announced */
	__u64 wakes_lost; /* records that found the ring full: the guardian looks through `stops` */
	__u32 agent_tgid;
	__u32 guardian_tgid;
};

enum pause_reason {
	PAUSE_QUEUE = 1,
	PAUSE_GATE,
	PAUSE_COPY, /* at a copy between host and device: pcie.h */
	PAUSE_TURN, /* a periodic process waits for its turn on the device */
};

/* Ring buffer `pauses` (for the guardian). However often a process is stopped before it is resumed: one record. */
enum pause_kind {
	PAUSE_STOPPED = 1, /* a process was added to `stops` */
	PAUSE_FREE, /* the slot's last online request is over, or its turn was given back */
	PAUSE_AGENT_EXIT,
	PAUSE_HELD, /* struct held of quota.h */
	PAUSE_LINK_FREE, /* the last online copy on the link (in `slot`) is over */
};

struct wake {
	__u32 kind;
	__u32 slot;
	struct process_id process;
};

/*
 * Map `stops`: a process that was stopped at a launch. The guardian deletes it before it resumes the process: so a stop
 * that finds it there will be ended by that resume, and one that does not is reported.
 */
struct pause {
	__u32 kind; /* 0: not filled in yet */
	__u32 reason;
	struct process_id process;
	__u32 slot;
	__u32 link; /* with PAUSE_COPY: index of `links` */
	__u64 at_ns; /* the first stop since it was resumed; the rest is of the latest one */
	__u64 ran_ns; /* when it first launched though it was not resumed; 0: it did not … */
	__u64 foreign_ns; /* … and when it last did */
	__u64 queued_ns; /* without the launch that was stopped */
	__u64 estimate_ns; /* of the launch that was stopped */
	__u64 charged_ns; /* of the process, ever, with that launch */
	__u64 due_ns; /* of a periodic process: when its request is to have ended */
	struct rule rule; /* that it was stopped under */
};
