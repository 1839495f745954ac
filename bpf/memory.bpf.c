// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "bounds.bpf.h"
#include "context.bpf.c"
#include "graph.bpf.h"
#include "memory.bpf.h"
#include "process.bpf.h"
#include "quota.bpf.c"
#include "registers.bpf.h"

struct array_descriptor { /* CUDA_ARRAY_DESCRIPTOR and CUDA_ARRAY3D_DESCRIPTOR, as if all were the latter */
	__u64 width, height, depth;
	__u32 format, channels, flags;
};

#define ARRAY_LAYERED 1

static __always_inline __u32 space_of(__u32 kind)
{
	if (kind == MEMORY_VIRTUAL)
		return SPACE_HANDLE;
	if (kind == MEMORY_ARRAY)
		return SPACE_ARRAY;
	return kind == MEMORY_PINNED ? SPACE_HOST : SPACE_ADDRESS;
}

/* Reads `count` numbers of 4 or 8 bytes. */
static __always_inline int read_sizes(struct array_descriptor *to, __u64 address, __u32 count, int narrow, __u64 *end)
{
	__u32 narrows[3] = {};
	__u64 wides[3] = {};
	__u32 bytes = count * (narrow ? 4 : 8);

	if (narrow) {
		if (bpf_probe_read_user(narrows, count == 3 ? 12 : 8, (void *)address))
			return 0;
		to->width = narrows[0];
		to->height = narrows[1];
		to->depth = narrows[2];
	} else {
		if (bpf_probe_read_user(wides, count == 3 ? 24 : 16, (void *)address))
			return 0;
		to->width = wides[0];
		to->height = wides[1];
		to->depth = wides[2];
	}
	*end = address + bytes;
	return 1;
}

static __always_inline int read_array(struct array_descriptor *to, __u64 address, __u32 shape, int narrow)
{
	__u32 rest[3] = {};
	__u64 end;

	if (!read_sizes(to, address, shape == ALLOC_ARRAY ? 2 : 3, narrow, &end))
		return 0;
	if (bpf_probe_read_user(rest, shape == ALLOC_ARRAY ? 8 : 12, (void *)end))
		return 0;
	to->format = rest[0];
	to->channels = rest[1];
	to->flags = rest[2];
	return 1;
}

/* CUarray_format: the low bits say the kind of number, of which these have one, two or four bytes. */
static __always_inline __u32 format_bytes(__u32 format)
{
	switch (format) {
	case 0x01: /* UNSIGNED_INT8 */
	case 0x08: /* SIGNED_INT8 */
		return 1;
	case 0x02: /* UNSIGNED_INT16 */
	case 0x09: /* SIGNED_INT16 */
	case 0x10: /* HALF */
		return 2;
	}
	return 4; /* UNSIGNED_INT32, SIGNED_INT32, FLOAT; compressed formats are smaller */
}

/* Without a branch: the verifier would follow both ways at each level of a mipmap. For values below 2^63. */
static __always_inline __u64 at_least_1(__u64 value)
{
	return value | (value - 1) >> 63;
}

#define MOST_LEVELS 20 /* of a mipmap: an array is at most 2^17 wide */

static __always_inline __u64 array_bytes(const struct array_descriptor *a, __u32 levels)
{
	__u64 width = a->width, height = at_least_1(a->height), depth = at_least_1(a->depth), elements = 0;

	if ((width | height | depth) >= MOST_ARRAY_SIDE || a->channels >= MOST_CHANNELS)
		return BEYOND;
	for (__u32 level = 0; level < MOST_LEVELS; level++) {
		if (level >= levels)
			break;
		elements += width * height * depth;
		width = at_least_1(width >> 1);
		height = at_least_1(height >> 1);
		if (!(a->flags & ARRAY_LAYERED))
			depth = at_least_1(depth >> 1);
	}
	return elements * a->channels * format_bytes(a->format);
}

/* False when the allocation is not on a device at all. */
static __always_inline int find_location(const struct call *call, __u32 *device)
{
	struct location location = {};

	if (bpf_probe_read_user(&location, sizeof(location), (void *)call->c + LOCATION_OFFSET)) {
		count_lost(LOST_USER_READ);
		*device = DEVICE_UNKNOWN;
		return 1;
	}
	if (location.type != LOCATION_DEVICE)
		return 0;
	*device = known_ordinal(location.id);
	return 1;
}

static __always_inline __u64 allocated_bytes(const struct call *call, int narrow, __u32 *element_bytes)
{
	struct array_descriptor array = {};
	__u32 shape = COOKIE_SHAPE(call->cookie);

	switch (shape) {
	case ALLOC_PITCH: /* known only now, and written where the second argument points */
		return product(read_result(call->b) & (narrow ? 0xffffffff : ~0ull), narrow ? (__u32)call->c : call->c);
	case ALLOC_ARRAY:
	case ALLOC_ARRAY_3D:
	case ALLOC_MIPMAP:
		if (!read_array(&array, call->b, shape, narrow)) {
			count_lost(LOST_USER_READ);
			return 0;
		}
		*element_bytes = array.channels * format_bytes(array.format);
		return array_bytes(&array, shape == ALLOC_MIPMAP ? (__u32)call->c : 1);
	}
	return narrow ? (__u32)call->b : call->b;
}

/* What the call is about to take, and of which device. A pitch is known only afterwards; devices have one of 512. */
static __always_inline __u64 bytes_to_take(const struct call *call, __u64 width, __u32 *device)
{
	int narrow = MEMORY_IS_NARROW(COOKIE_DETAIL(call->cookie));
	__u32 unused;

	if (COOKIE_SHAPE(call->cookie) == ALLOC_PITCH)
		return narrow ? product(((__u32)width + 511) & ~511u, (__u32)call->c)
			      : product(width > MOST_BYTES ? BEYOND : (width + 511) & ~511ull, call->c);
	if (COOKIE_SHAPE(call->cookie) == ALLOC_PHYSICAL && !find_location(call, device))
		return 0;
	return allocated_bytes(call, narrow, &unused);
}

#define CUDA_ERROR_OUT_OF_MEMORY 2

/* What the rule of its process says of a call. No inline function: see count_copy. */
__noinline int judge_call(struct call *call, __u64 width, int can_deny)
{
	struct process_id id = this_process();
	struct memory_rule *rule = bpf_map_lookup_elem(&memory_rules, &id);
	__u32 device = current_device();

	if (!rule || !call)
		return VERDICT_PASS;
	call->d = bytes_to_take(call, width, &device);
	return judge_allocation(&id, rule, device, call->d, can_deny);
}

static __always_inline int enter_memory(struct pt_regs *ctx, int can_deny)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	__u32 shape = COOKIE_SHAPE(cookie);
	struct call call = {.a = arguments.first, .b = arguments.second, .cookie = cookie};
	__s64 *ret;

	if (!begin_call(ctx, cookie, &id))
		return 0;
	call.c = shape == ALLOC_PITCH ? arguments.fourth : arguments.third; /* the height, the property, the levels */
	call.stream = stream_of(ctx, cookie);
	keep_call(CALL_MEMORY, &call);
	settle_charge(
		bpf_get_current_pid_tgid()); /* of a call inside of which this one is, or whose return was not seen */
	if (MEMORY_KIND(COOKIE_DETAIL(cookie)) == MEMORY_PINNED || !bpf_map_lookup_elem(&memory_rules, &id))
		return 0;
	ret = can_deny ? bpf_map_lookup_elem(&returns, &cookie) : NULL;
	if (judge_call(&call, arguments.third, ret != NULL) == VERDICT_DENY && ret)
		return_early(ctx, CUDA_ERROR_OUT_OF_MEMORY, PT_REGS_IP(ctx) + *ret);
	return 0;
}

PROBE("uprobe", memory_enter)
{
	return enter_memory(ctx, 0);
}

/* The same where uprobes may change registers (deny.bpf.c). Not loaded by itself: others refuse it, and all with it. */
PROBE_ALONE("?uprobe", memory_enter_or_deny)
{
	return enter_memory(ctx, 1);
}

static __always_inline void book_allocation(struct pt_regs *ctx)
{
	struct current current = current_context();
	struct allocation_key key = {.process = this_process()};
	struct allocation allocation = {.device = current.device, .context = current.context, .references = 1};
	struct memory_value *value;
	struct call call;
	__u32 shape, detail;
	int narrow;

	if (!take_call(CALL_MEMORY, &call))
		return;
	shape = COOKIE_SHAPE(call.cookie);
	detail = COOKIE_DETAIL(call.cookie);
	narrow = MEMORY_IS_NARROW(detail);
	allocation.kind = MEMORY_KIND(detail);
	key.space = space_of(allocation.kind);
	if (shape == ALLOC_PHYSICAL) {
		allocation.context = 0;
		if (!find_location(&call, &allocation.device))
			return;
	}
	if (!succeeded(ctx)) {
		value = memory_of(&key.process, allocation.device);
		if (value)
			__sync_fetch_and_add(&value->failures, 1);
		return;
	}
	if (allocation.kind == MEMORY_POOL) {
		struct graph *capture =
			find_capture(&key.process, bpf_map_lookup_elem(&processes, &key.process), call.stream);

		if (capture) {
			graph_allocates(&key.process, capture, read_result(call.a), call.b, current.device);
			return;
		}
	}
	key.pointer = shape == ALLOC_REGISTER ? call.a : read_result(call.a);
	if (narrow && key.space == SPACE_ADDRESS)
		key.pointer = (__u32)key.pointer;
	allocation.bytes = allocated_bytes(&call, narrow, &allocation.element_bytes);
	allocation.at_ns = bpf_ktime_get_ns();
	add_allocation(&key, &allocation);
}

PROBE("uretprobe", memory_alloc_return)
{
	book_allocation(ctx);
	settle_charge(
		bpf_get_current_pid_tgid()); /* last: what is taken is counted twice for a moment, never not at all */
	return 0;
}

/* Whether more than this handle keeps the memory. */
static __always_inline int is_shared(const struct allocation_key *key, struct allocation *found)
{
	struct allocation *allocation = bpf_map_lookup_elem(&allocations, key);

	if (key->space != SPACE_HANDLE || !allocation || allocation->references <= 1)
		return 0;
	*found = *allocation;
	return 1;
}

static __always_inline void end_free(struct freeing *freeing)
{
	if (freeing->is_shared)
		drop_reference(&freeing->key, freeing->allocation.at_ns);
	else
		book_free(&freeing->key.process, &freeing->allocation);
}

/*
 * Taken out at entry: when the call returns, another thread may have been given the same address already. Put back when
 * the call failed.
 */
PROBE("uprobe", memory_free_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 detail = COOKIE_DETAIL(cookie);
	struct allocation_key key = {.process = this_process(), .space = space_of(MEMORY_KIND(detail))};
	struct process *process = find_process(&key.process, cookie);
	__u64 address = PT_REGS_PARM1(ctx), tid = bpf_get_current_pid_tgid();
	struct freeing freeing = {};
	struct graph *capture;

	if (is_duplicate(ctx, cookie))
		return 0;
	capture =
		MEMORY_KIND(detail) == MEMORY_POOL ? find_capture(&key.process, process, stream_of(ctx, cookie)) : NULL;
	if (capture) {
		graph_frees(&key.process, capture, address);
		return 0;
	}
	key.pointer = MEMORY_IS_NARROW(detail) ? (__u32)address : address;
	freeing.key = key;
	freeing.is_shared = is_shared(&key, &freeing.allocation);
	if (!freeing.is_shared && !take_allocation(&key, &freeing.allocation))
		return 0;
	if (bpf_map_update_elem(&freeings, &tid, &freeing, BPF_ANY)) {
		count_lost(LOST_CALL);
		end_free(&freeing); /* nearly all succeed */
	}
	return 0;
}

PROBE("uretprobe", memory_free_return)
{
	__u64 tid = bpf_get_current_pid_tgid();
	struct freeing *freeing = bpf_map_lookup_elem(&freeings, &tid);

	if (!freeing)
		return 0;
	if (succeeded(ctx))
		end_free(freeing);
	else if (!freeing->is_shared)
		put(&allocations, &freeing->key, &freeing->allocation, LOST_ALLOCATION);
	bpf_map_delete_elem(&freeings, &tid);
	return 0;
}
