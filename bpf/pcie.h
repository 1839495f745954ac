/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Pacing copies between host and device by bytes, at their calls.
 *
 * Each device has two links, one per direction. A copy occupies its link for its bytes ÷ the link's speed, after those
 * before it; it counts as under way until then, or until a wait of its process for its stream has returned. An offline
 * process stops at a copy, before the driver sees it, while an online copy is under way, or while its container is ahead
 * of the others: start-time fair queueing (Goyal, Vin and Cheng, 1996) with one virtual time per container, to which a
 * copy adds its link time ÷ the container's weight. The guardian resumes it; the copy that was stopped then goes through.
 *
 * A copy that runs is never cut: an online one meets at most LINK_QUEUE_NS of offline copies, and the one that passed last.
 */
#pragma once
#include "abi.h"
#include "pace.h"

#define LINK_DIRECTIONS 2 /* as enum copy_direction: host to device, device to host */
#define LINKS (SLOTS * LINK_DIRECTIONS)
#define MOST_COPIERS 16 /* containers that share a link */
#define WEIGHT_ONE 1000 /* of a container of weight 1 */

/* So far a container may be ahead of the one that has had least, in time of the link at its own use of it. */
#define LINK_LEAD_NS 2000000ull
/* So much of offline copies may be under way where an online process could copy. */
#define LINK_QUEUE_NS 500000ull
/* What is under way is believed for so long, before the next copy: arguments of calls may name any size. */
#define LINK_LONGEST_NS 1000000000ull
/* What a container had under way before that held for it is not known: it gets so long to end. */
#define LINK_SETTLE_NS 50000000ull

/* One offline container on a link. */
struct copier {
	__u32 group; /* the container's; 0: a free place */
	__u32 weight; /* × WEIGHT_ONE */
	__u64 virtual_ns; /* Σ link time ÷ weight */
	__u64 until_ns; /* it has copies under way, or will have at once */
	__u32 settled; /* LINK_SETTLE_NS were given */
	__u32 _pad;
};

struct link {
	__u64 bytes_per_second; /* written by the agent; 0: not known, no copy is stopped */
	__u64 online_until_ns; /* the online copies under way end … */
	__u64 online_at_ns; /* … of which the latest was then, … */
	__u64 online_stream; /* … all in one stream, 0: in several … */
	struct process_id online_process; /* … of one process; tgid 0: of several */
	__u64 virtual_ns; /* of the container that has had least, of those that copied: only grows */
	__u64 queued_until_ns; /* the offline copies that were let through end; also written by the guardian */
	__u64 waiting; /* processes stopped at a copy there; written by the guardian */
	__u64 free_posted; /* PAUSE_LINK_FREE is in the ring; reset by the guardian */
	struct copier copiers[MOST_COPIERS];
};
