// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "bounds.bpf.h"
#include "pace.bpf.c"
#include "quota.h"

enum verdict {
	VERDICT_PASS,
	VERDICT_DENY,
};

#define CHARGE_NS                                                                                                      \
	10000000000ull /* how long an allocation may take; one that is parked in its call must not hold room for good */

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
		__u64 own = 0;

		if (i >= quota->count)
			break;
		value = bpf_map_lookup_elem(&memory, &quota->members[i]);
		if (!value)
			continue;
#pragma unroll
		for (int kind = 0; kind < MEMORY_PINNED; kind++)
			own += value->live_bytes[kind];
		live += own > MOST_BYTES ? 0 : own; /* below 0: frees that overtook their allocations */
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

/* Who takes the bytes out gives them back, once. False: another CPU did. */
static __always_inline int end_charge(struct charge *charge)
{
	__u64 bytes = __sync_lock_test_and_set(&charge->bytes, 0);

	if (!bytes)
		return 0;
	give_back(charge->group, charge->slot, bytes);
	if (charge->takes_room)
		give_back(GROUP_ALL, charge->slot, bytes);
	return 1;
}

/* The thread's latest allocation is over: it is live by now, or failed. */
static __always_inline void settle_charge(__u64 tid)
{
	struct charge *charge = bpf_map_lookup_elem(&charges, &tid);

	if (!charge)
		return;
	end_charge(charge);
	bpf_map_delete_elem(&charges, &tid);
}

/* Whether the guardian knows often enough that the process is held. */
static __always_inline int is_known_to_be_held(const struct process_id *id)
{
	__u64 *records = bpf_map_lookup_elem(&holding, id);

	return records && *records >= MOST_HELD;
}

static __always_inline void count_held(struct quota_use *use, int for_room)
{
	if (!use)
		return;
	__sync_fetch_and_add(&use->held, 1);
	if (for_room)
		__sync_fetch_and_add(&use->for_room, 1);
}

static long expire_charge(void *map, __u64 *tid, struct charge *charge, __u64 *now)
{
	if (charge->until_ns > *now || !end_charge(charge))
		return 0;
	count_lost(LOST_CHARGE);
	bpf_map_delete_elem(map, tid);
	return 0;
}

/* Allocations that were parked before they returned. Never attached: user space runs it now and then. */
SEC("raw_tp")
int expire_charges(void *ctx)
{
	__u64 now = bpf_ktime_get_ns();

	bpf_for_each_map_elem(&charges, expire_charge, &now, 0);
	return 0;
}

/* Whether the group could ever have so much: what it never can must not keep room from others while it waits. */
static __always_inline int could_fit(__u32 group, __u32 slot, __u64 bytes)
{
	struct quota_key key = {.group = group, .slot = slot};
	struct quota *quota = bpf_map_lookup_elem(&quotas, &key);

	return !quota || bytes <= quota->limit_bytes;
}

/* Stops the process unless no record of it can be written. */
static __always_inline void hold_allocation(const struct process_id *id, const struct memory_rule *rule, __u32 slot,
					    __u64 bytes, int for_room, __u64 now)
{
	struct quota_use *use = use_of(rule->group, slot);
	__u64 none = 0, *records;
	struct held *held;

	if (is_known_to_be_held(id) && stop_current_process() && is_known_to_be_held(id)) { /* not resumed meanwhile */
		count_held(use, for_room);
		return;
	}
	records = find_or_add(&holding, id, &none, LOST_QUOTA);
	held = records ? bpf_ringbuf_reserve(&pauses, sizeof(struct held), 0) : NULL;
	if (!held) {
		if (records)
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
	__sync_fetch_and_add(records, 1);
	count_held(use, for_room);
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
	struct charge charge = {.bytes = bytes, .until_ns = now + CHARGE_NS, .group = rule->group, .slot = slot};
	int own, room = 1;

	if (slot >= SLOTS || !bytes || bytes > MOST_BYTES) /* the driver's own to refuse */
		return VERDICT_PASS;
	charge.takes_room = could_fit(charge.group, slot, bytes);
	/* Of a thread that has no place nothing could be charged: beyond what there is for its tenant, it gets no memory. */
	if (!this_stack() || bpf_map_update_elem(&charges, &tid, &charge, BPF_ANY)) {
		count_lost(LOST_QUOTA);
		return can_deny && (rule->flags & QUOTA_DENY) && may_stop(now) ? VERDICT_DENY : VERDICT_PASS;
	}
	own = charge_group(charge.group, slot, bytes);
	if (charge.takes_room)
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
	if (rule->flags & QUOTA_HOLD) {
		charge.until_ns += rule->max_hold_ns; /* it keeps its place for as long as it is held */
		bpf_map_update_elem(&charges, &tid, &charge, BPF_EXIST);
		hold_allocation(id, rule, slot, bytes, own, now);
	}
	return VERDICT_PASS;
}
