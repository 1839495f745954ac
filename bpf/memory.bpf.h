/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The totals of live memory. */
#pragma once
#include "bounds.bpf.h"

static __always_inline struct memory_value *memory_of(const struct process_id *id, __u32 device)
{
	struct memory_key key = {.process = *id, .device = device};
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);

	return blank ? find_or_add(&memory, &key, &blank->memory, LOST_MEMORY) : NULL;
}

static __always_inline __u32 kind_of(const struct allocation *allocation)
{
	return allocation->kind & (MEMORY_KINDS - 1);
}

/* Also of a context, if there is room to remember it; else it is freed by its own call, or with the process. */
static __always_inline void join_context(const struct process_id *id, struct allocation *allocation)
{
	struct context_key key = {.process = *id, .context = allocation->context};
	__u32 zero = 0, device_plus_1 = allocation->device + 1;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);
	struct context_memory *sums;

	if (!allocation->context || !blank)
		return;
	sums = find_or_add(&context_memories, &key, &blank->context_memory, LOST_CONTEXT_MEMORY);
	if (sums && !sums->device_plus_1)
		sums->device_plus_1 = device_plus_1;
	if (!sums || sums->device_plus_1 != device_plus_1) {
		allocation->context = 0;
		return;
	}
	__sync_fetch_and_add(&sums->allocations, 1);
	__sync_fetch_and_add(&sums->live_bytes[kind_of(allocation)], allocation->bytes);
}

/* False when it went with its context already. */
static __always_inline int leave_context(const struct process_id *id, const struct allocation *allocation)
{
	struct context_key key = {.process = *id, .context = allocation->context};
	struct context_memory *sums = key.context ? bpf_map_lookup_elem(&context_memories, &key) : NULL;

	if (!sums)
		return 1;
	if (allocation->at_ns <= sums->ended_ns)
		return 0;
	__sync_fetch_and_add(&sums->allocations, -1);
	__sync_fetch_and_add(&sums->live_bytes[kind_of(allocation)], -allocation->bytes);
	return 1;
}

static __always_inline void book_free(const struct process_id *id, const struct allocation *allocation)
{
	struct memory_key key = {.process = *id, .device = allocation->device};
	struct memory_value *value = bpf_map_lookup_elem(&memory, &key);

	if (!value || !leave_context(id, allocation))
		return;
	__sync_fetch_and_add(&value->frees, 1);
	__sync_fetch_and_add(&value->live_bytes[kind_of(allocation)], -allocation->bytes);
}

/* Everything that a context held goes with it. */
static __always_inline void end_context_memory(const struct process_id *id, __u64 context)
{
	struct context_key key = {.process = *id, .context = context};
	struct context_memory *sums = bpf_map_lookup_elem(&context_memories, &key);
	struct memory_key of_device = {.process = *id};
	struct memory_value *value;

	if (!sums)
		return;
	of_device.device = sums->device_plus_1 - 1;
	value = bpf_map_lookup_elem(&memory, &of_device);
	sums->ended_ns = bpf_ktime_get_ns();
	if (!value)
		return;
	__sync_fetch_and_add(&value->frees, __sync_lock_test_and_set(&sums->allocations, 0));
#pragma unroll
	for (int kind = 0; kind < MEMORY_KINDS; kind++)
		__sync_fetch_and_add(&value->live_bytes[kind], -__sync_lock_test_and_set(&sums->live_bytes[kind], 0));
}

/* 0 for one that was made before the probes were there. */
static __always_inline int take_allocation(const struct allocation_key *key, struct allocation *taken)
{
	struct allocation *allocation = bpf_map_lookup_elem(&allocations, key);

	if (!allocation)
		return 0;
	*taken = *allocation;
	drop(&allocations, key, LOST_ALLOCATION);
	return 1;
}

/* No device has it: a library of the process's own said so. Not booked, so nothing is to be freed either. */
static __always_inline int is_beyond(const struct memory_value *value, const struct allocation *allocation)
{
	__u64 live = 0;

	for (int kind = 0; kind < MEMORY_KINDS; kind++)
		live += value->live_bytes[kind];
	return allocation->bytes > MOST_BYTES || live + allocation->bytes > MOST_BYTES;
}

/* False where there is no place for it, so that its end will not be seen. */
static __always_inline int keep_allocation(const struct allocation_key *key, struct allocation *allocation)
{
	join_context(&key->process, allocation);
	if (take_credit(LOST_ALLOCATION) && !bpf_map_update_elem(&allocations, key, allocation, BPF_ANY))
		return 1;
	leave_context(&key->process, allocation);
	count_lost(LOST_ALLOCATION);
	return 0;
}

/* Of a handle that is not in use. */
static __always_inline void add_new_allocation(const struct allocation_key *key, struct allocation *allocation)
{
	struct memory_value *value = memory_of(&key->process, allocation->device);
	__u64 live = 0;

	if (!value)
		return; /* by its sums user space knows whose allocations to delete */
	if (is_beyond(value, allocation)) {
		count_lost(LOST_BOUNDS);
		return;
	}
	/* Under a rule it counts for as long as the process lives: allocations beyond what can be followed make it no less. */
	if (!keep_allocation(key, allocation) && !bpf_map_lookup_elem(&memory_rules, &key->process))
		return;
	__sync_fetch_and_add(&value->allocations, 1);
	__sync_fetch_and_add(&value->live_bytes[kind_of(allocation)], allocation->bytes);
#pragma unroll
	for (int i = 0; i < MEMORY_PINNED; i++)
		live += value->live_bytes[i];
	if (live > value->peak_bytes)
		value->peak_bytes = live;
}

static __always_inline void add_allocation(const struct allocation_key *key, struct allocation *allocation)
{
	struct allocation before;

	if (take_allocation(key, &before)) /* freed by a call that we do not know, or its return was not seen */
		book_free(&key->process, &before);
	add_new_allocation(key, allocation);
}

/* One handle or mapping of physical memory less, and the last one frees it; `at_ns`: when it was made. */
static __always_inline void drop_reference(const struct allocation_key *key, __u64 at_ns)
{
	struct allocation *allocation = bpf_map_lookup_elem(&allocations, key);
	struct allocation gone;

	if (!allocation || allocation->at_ns != at_ns || __sync_fetch_and_add(&allocation->references, -1) > 1)
		return;
	gone = *allocation;
	drop(&allocations, key, LOST_ALLOCATION);
	book_free(&key->process, &gone);
}

static long remove_if_of(void *map, struct allocation_key *key, struct allocation *allocation, struct process_id *id)
{
	if (key->process.tgid != id->tgid || key->process.start_ticks != id->start_ticks)
		return 0;
	book_free(&key->process, allocation);
	bpf_map_delete_elem(map, key);
	return 0;
}

/* Everything that a process held. Looks through all allocations of the node: only where it becomes another program. */
static __always_inline void remove_allocations(struct process_id *id)
{
	bpf_for_each_map_elem(&allocations, remove_if_of, id, 0);
}
