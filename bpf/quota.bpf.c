// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "pace.bpf.c"
#include "quota.h"

enum verdict {
	VERDICT_PASS,
	VERDICT_DENY,
};

#define LARGEST_BYTES (1ull << 46) /* more than any device has: the driver's own to refuse */

static __always_inline struct quota_use *use_of(__u32 group, __u32 slot)
{
	struct quota_key key = {.group = group, .slot = slot};

	return bpf_map_lookup_elem(&quota_uses, &key);
}

static __always_inline __u64 live_of(const struct quota *quota)
{
	__u64 live = quota->other_bytes;

	for (__u32 i = 0; i < MOST_MEMBERS; i++) {
		struct memory_value *value;

		if (i >= quota->count)
			break;
		value = bpf_map_lookup_elem(&memory, &quota->members[i]);
		if (!value)
			continue;
#pragma unroll
		for (int kind = 0; kind < MEMORY_PINNED; kind++)
			live += value->live_bytes[kind];
	}
	return live;
}

static __always_inline void give_back(__u32 group, __u32 slot, __u64 bytes)
{
	struct quota_use *use = use_of(group, slot);

	if (use)
		__sync_fetch_and_add(&use->pending_bytes, -bytes);
}

/* Charges a call, whatever there is; false when it does not fit. A call that returns at this very moment counts twice. */
static __noinline int charge_group(__u32 group, __u32 slot, __u64 bytes)
{
	struct quota_key key = {.group = group, .slot = slot};
	struct quota_use initial = {};
	struct quota *quota = bpf_map_lookup_elem(&quotas, &key);
	struct quota_use *use = find_or_add(&quota_uses, &key, &initial, LOST_QUOTA);
	__u64 before;

	if (!use)
		return 1;
	before = __sync_fetch_and_add(&use->pending_bytes, bytes);
	return !quota || live_of(quota) + before + bytes <= quota->limit_bytes;
}

static __noinline int fits_now(__u32 group, __u32 slot)
{
	struct quota_key key = {.group = group, .slot = slot};
	struct quota *quota = bpf_map_lookup_elem(&quotas, &key);
	struct quota_use *use = bpf_map_lookup_elem(&quota_uses, &key);
	__u64 pending;

	if (!quota || !use)
		return 1;
	pending = use->pending_bytes;
	return live_of(quota) + pending <= quota->limit_bytes;
}

/* The thread's latest allocation is over: it is live by now, or failed. */
static __always_inline void settle_charge(__u64 tid)
{
	struct charge *charge = bpf_map_lookup_elem(&charges, &tid);

	if (!charge)
		return;
	give_back(charge->group, charge->slot, charge->bytes);
	give_back(GROUP_ALL, charge->slot, charge->bytes);
	bpf_map_delete_elem(&charges, &tid);
}

/* Stops the process unless nobody would hear of it. */
static __always_inline void hold_allocation(const struct process_id *id, const struct memory_rule *rule, __u32 slot,
					    __u64 bytes, int for_room, __u64 now)
{
	struct quota_use *use = use_of(rule->group, slot);
	struct held *held = bpf_ringbuf_reserve(&pauses, sizeof(struct held), 0);

	if (!held) {
		count_lost(LOST_EVENT);
		return;
	}
	if (!stop_current_process()) {
		bpf_ringbuf_discard(held, 0);
		return;
	}
	held->kind = PAUSE_HELD;
	held->group = rule->group;
	held->process = *id;
	held->slot = slot;
	held->for_room = for_room;
	held->at_ns = now;
	held->bytes = bytes;
	held->max_hold_ns = rule->max_hold_ns;
	bpf_ringbuf_submit(held, 0);
	if (!use)
		return;
	__sync_fetch_and_add(&use->held, 1);
	if (for_room)
		__sync_fetch_and_add(&use->for_room, 1);
}

static __always_inline void count_denied(__u32 group, __u32 slot, int for_room)
{
	struct quota_use *use = use_of(group, slot);

	if (!use)
		return;
	__sync_fetch_and_add(&use->denied, 1);
	if (for_room)
		__sync_fetch_and_add(&use->for_room, 1);
}

/* An allocation of `bytes` begins: it is charged, and refused or held if it fits no more. */
static __always_inline enum verdict judge_allocation(const struct process_id *id, const struct memory_rule *rule,
						     __u32 device, __u64 bytes, int can_deny)
{
	__u32 slot = device < ORDINALS ? rule->slots[device & (ORDINALS - 1)] : rule->slot_unknown;
	__u64 now = bpf_ktime_get_ns(), tid = bpf_get_current_pid_tgid();
	struct charge charge = {.bytes = bytes, .group = rule->group, .slot = slot};
	int own, room;

	if (slot >= SLOTS || !bytes || bytes >= LARGEST_BYTES)
		return VERDICT_PASS;
	if (bpf_map_update_elem(&charges, &tid, &charge, BPF_ANY)) {
		count_lost(LOST_QUOTA);
		return VERDICT_PASS;
	}
	own = charge_group(charge.group, slot, bytes);
	room = charge_group(GROUP_ALL, slot, bytes);
	if (own && room)
		return VERDICT_PASS;
	own = fits_now(charge.group, slot); /* a second look, for what the first may have counted twice */
	room = fits_now(GROUP_ALL, slot);
	if ((own && room) || !may_stop(now))
		return VERDICT_PASS;
	if (can_deny && (rule->flags & QUOTA_DENY)) {
		settle_charge(tid);
		count_denied(charge.group, slot, own);
		return VERDICT_DENY;
	}
	if (rule->flags & QUOTA_HOLD)
		hold_allocation(id, rule, slot, bytes, own, now);
	return VERDICT_PASS;
}
