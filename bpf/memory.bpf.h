/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The books of live memory. */
#pragma once
#include "maps.bpf.h"

static __always_inline struct memory_value *memory_of(const struct process_id *id, __u32 device)
{
	struct memory_key key = {.process = *id, .device = device};
	struct memory_value initial = {};

	return find_or_add(&memory, &key, &initial, LOST_MEMORY);
}

static __always_inline void book_free(const struct process_id *id, const struct allocation *allocation)
{
	struct memory_key key = {.process = *id, .device = allocation->device};
	struct memory_value *value = bpf_map_lookup_elem(&memory, &key);

	if (!value)
		return;
	__sync_fetch_and_add(&value->frees, 1);
	__sync_fetch_and_add(&value->live_bytes[allocation->kind & (MEMORY_KINDS - 1)], -allocation->bytes);
}

/* 0 for one that was made before the probes were there. */
static __always_inline int take_allocation(const struct allocation_key *key, struct allocation *taken)
{
	struct allocation *allocation = bpf_map_lookup_elem(&allocations, key);

	if (!allocation)
		return 0;
	*taken = *allocation;
	bpf_map_delete_elem(&allocations, key);
	return 1;
}

static __always_inline void add_allocation(const struct allocation_key *key, const struct allocation *allocation)
{
	struct memory_value *value = memory_of(&key->process, allocation->device);
	struct allocation before;
	__u64 live = 0;

	if (take_allocation(key, &before)) /* freed by a call that we do not know, or its return was not seen */
		book_free(&key->process, &before);
	if (!value)
		return; /* by its sums user space knows whose allocations to delete */
	if (bpf_map_update_elem(&allocations, key, allocation, BPF_ANY)) {
		count_lost(LOST_ALLOCATION);
		return;
	}
	__sync_fetch_and_add(&value->allocations, 1);
	__sync_fetch_and_add(&value->live_bytes[allocation->kind & (MEMORY_KINDS - 1)], allocation->bytes);
#pragma unroll
	for (int i = 0; i < MEMORY_PINNED; i++)
		live += value->live_bytes[i];
	if (live > value->peak_bytes)
		value->peak_bytes = live;
}

/* One handle or mapping of physical memory less, and the last one frees it; `at_ns`: when it was made. */
static __always_inline void drop_reference(const struct allocation_key *key, __u64 at_ns)
{
	struct allocation *allocation = bpf_map_lookup_elem(&allocations, key);
	struct allocation gone;

	if (!allocation || allocation->at_ns != at_ns || __sync_fetch_and_add(&allocation->references, -1) > 1)
		return;
	gone = *allocation;
	bpf_map_delete_elem(&allocations, key);
	book_free(&key->process, &gone);
}

struct removal {
	struct process_id process;
	__u64 context; /* 0: all of the process */
};

static long remove_if_of(void *map, struct allocation_key *key, struct allocation *allocation, struct removal *removal)
{
	if (key->process.tgid != removal->process.tgid || key->process.start_ticks != removal->process.start_ticks)
		return 0;
	if (removal->context && allocation->context != removal->context)
		return 0;
	book_free(&key->process, allocation);
	bpf_map_delete_elem(map, key);
	return 0;
}

/* Everything that a context held, or a process. Looks through all allocations of the node: such calls are rare. */
static __always_inline void remove_allocations(const struct process_id *id, __u64 context)
{
	struct removal removal = {.process = *id, .context = context};

	bpf_for_each_map_elem(&allocations, remove_if_of, &removal, 0);
}
