// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "memory.bpf.h"
#include "process.bpf.h"

/* When the memory was made; 0 where that was before the probes were there, or by another process. */
static __always_inline __u64 add_reference(const struct allocation_key *key)
{
	struct allocation *allocation = bpf_map_lookup_elem(&allocations, key);

	if (!allocation)
		return 0;
	__sync_fetch_and_add(&allocation->references, 1);
	return allocation->at_ns;
}

static __always_inline void remove_mapping(void *map, struct mapping_key *key, const struct mapping *mapping)
{
	struct allocation_key memory = {.process = key->process, .space = SPACE_HANDLE, .pointer = mapping->handle};
	__u64 allocated_ns = mapping->allocated_ns;

	drop(map, key, LOST_MAPPING);
	drop_reference(&memory, allocated_ns);
}

static __always_inline void add_mapping(const struct process_id *id, const struct call *call)
{
	struct allocation_key memory = {.process = *id, .space = SPACE_HANDLE, .pointer = call->c};
	struct mapping_key key = {.process = *id, .address = call->a};
	struct mapping mapping = {.bytes = call->b, .handle = call->c, .at_ns = bpf_ktime_get_ns()};
	struct mapping *stale = bpf_map_lookup_elem(&mappings, &key);

	if (stale) /* its unmapping was not seen */
		remove_mapping(&mappings, &key, stale);
	mapping.allocated_ns = add_reference(&memory);
	if (put(&mappings, &key, &mapping, LOST_MAPPING))
		return;
	drop_reference(&memory, mapping.allocated_ns);
}

/* A range of a process's addresses, as it was when a call began: what was mapped there since stays. */
struct unmapping {
	struct process_id process;
	__u64 first, end, before_ns;
};

static long remove_if_within(void *map, struct mapping_key *key, struct mapping *mapping, struct unmapping *range)
{
	if (key->process.tgid != range->process.tgid || key->process.start_ticks != range->process.start_ticks)
		return 0;
	if (key->address >= range->first && key->address < range->end && mapping->at_ns < range->before_ns)
		remove_mapping(map, key, mapping);
	return 0;
}

/* Nearly always the range is one mapping. Where it is several, all mappings of the node are looked through. */
static __always_inline void remove_mappings(const struct process_id *id, const struct call *call)
{
	struct mapping_key key = {.process = *id, .address = call->a};
	struct unmapping range = {.process = *id, .first = call->a, .end = call->a + call->b, .before_ns = call->d};
	struct mapping *first = bpf_map_lookup_elem(&mappings, &key);

	if (!first)
		return;
	if (first->bytes < call->b)
		bpf_for_each_map_elem(&mappings, remove_if_within, &range, 0);
	else if (first->at_ns < call->d)
		remove_mapping(&mappings, &key, first);
}

PROBE("uprobe", mapping_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	struct call call = {.a = arguments.first,
			    .b = arguments.second,
			    .c = arguments.fourth,
			    .d = bpf_ktime_get_ns(),
			    .cookie = cookie};

	if (!begin_call(ctx, cookie, &id))
		return 0;
	keep_call(CALL_MAPPING, &call);
	return 0;
}

PROBE("uretprobe", mapping_return)
{
	struct allocation_key key = {.process = this_process(), .space = SPACE_HANDLE};
	struct call call;

	if (!take_call(CALL_MAPPING, &call) || !succeeded(ctx))
		return 0;
	switch (COOKIE_SHAPE(call.cookie)) {
	case MAPPING_HANDLE:
		key.pointer = read_result(call.a);
		add_reference(&key);
		break;
	case MAPPING_MAP:
		add_mapping(&key.process, &call);
		break;
	case MAPPING_UNMAP:
		remove_mappings(&key.process, &call);
		break;
	}
	return 0;
}
