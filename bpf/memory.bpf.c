// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "maps.bpf.h"

static __always_inline struct memory_value *memory_of(const struct process_id *id, __u32 device)
{
	struct memory_key key = {.process = *id, .device = device};
	struct memory_value initial = {};

	return find_or_add(&memory, &key, &initial, LOST_MEMORY);
}

static __always_inline void add_allocation(struct process_id *id, __u64 pointer, __u64 bytes, __u32 kind, __u32 device)
{
	struct allocation_key key = {.process = *id, .pointer = pointer};
	struct allocation allocation = {
		.bytes = bytes, .at_ns = bpf_ktime_get_ns(), .device = device, .kind = kind & (MEMORY_KINDS - 1)};
	struct memory_value *value = memory_of(id, device);
	__u64 live = 0;

	if (bpf_map_update_elem(&allocations, &key, &allocation, BPF_ANY)) {
		count_lost(LOST_ALLOCATION);
		return;
	}
	if (!value)
		return;
	__sync_fetch_and_add(&value->allocations, 1);
	__sync_fetch_and_add(&value->live_bytes[kind & (MEMORY_KINDS - 1)], bytes);
#pragma unroll
	for (int i = 0; i < MEMORY_KINDS; i++)
		live += value->live_bytes[i];
	if (live > value->peak_bytes)
		value->peak_bytes = live;
}

static __always_inline void remove_allocation(struct process_id *id, __u64 pointer)
{
	struct allocation_key key = {.process = *id, .pointer = pointer};
	struct allocation *allocation = bpf_map_lookup_elem(&allocations, &key);
	struct memory_value *value;

	if (!allocation)
		return; /* made before the probes were there */
	value = memory_of(id, allocation->device);
	if (value) {
		__sync_fetch_and_add(&value->frees, 1);
		__sync_fetch_and_add(&value->live_bytes[allocation->kind & (MEMORY_KINDS - 1)], -allocation->bytes);
	}
	bpf_map_delete_elem(&allocations, &key);
}

SEC("uprobe")
int memory_enter(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 shape = COOKIE_SHAPE(cookie);
	struct process_id id = this_process();
	struct call_key key = {.pid_tgid = bpf_get_current_pid_tgid()};
	struct arguments arguments = read_arguments(ctx);
	struct call call = {.a = arguments.first, .b = arguments.second, .c = cookie};

	if (is_duplicate(ctx, cookie))
		return 0;
	find_process(&id, cookie);
	key.role = shape == FREE_POINTER ? CALL_FREE : CALL_ALLOC;
	if (shape == ALLOC_PITCH || shape == ALLOC_PHYSICAL) { /* one more argument: the height, the property */
		struct call_key more_key = {.pid_tgid = key.pid_tgid, .role = CALL_ALLOC | 0x100};
		struct call more = {.a = shape == ALLOC_PITCH ? arguments.fourth : arguments.third};

		if (bpf_map_update_elem(&calls, &more_key, &more, BPF_ANY))
			count_lost(LOST_CALL);
	}
	if (bpf_map_update_elem(&calls, &key, &call, BPF_ANY))
		count_lost(LOST_CALL);
	return 0;
}

/* False when the allocation is not on a device at all. */
static __always_inline int find_location(const struct call *property, __u32 *device)
{
	struct location location = {};

	*device = DEVICE_UNKNOWN;
	if (!property || bpf_probe_read_user(&location, sizeof(location), (void *)property->a + LOCATION_OFFSET)) {
		count_lost(LOST_USER_READ);
		return 1;
	}
	*device = location.id;
	return location.type == LOCATION_DEVICE;
}

SEC("uretprobe")
int memory_alloc_return(struct pt_regs *ctx)
{
	struct process_id id = this_process();
	struct call_key key = {.pid_tgid = bpf_get_current_pid_tgid(), .role = CALL_ALLOC};
	struct call_key more_key = {.pid_tgid = key.pid_tgid, .role = CALL_ALLOC | 0x100};
	struct call *call = bpf_map_lookup_elem(&calls, &key);
	struct call *more;
	struct memory_value *value;
	__u64 pointer = 0, bytes;
	__u32 device = current_device(), shape;

	if (!call)
		return 0;
	bytes = call->b;
	shape = COOKIE_SHAPE(call->c);
	more = bpf_map_lookup_elem(&calls, &more_key);
	if (shape == ALLOC_PHYSICAL && !find_location(more, &device))
		goto out;
	if (PT_REGS_RC(ctx) != 0) {
		value = memory_of(&id, device);
		if (value)
			__sync_fetch_and_add(&value->failures, 1);
		goto out;
	}
	if (bpf_probe_read_user(&pointer, sizeof(pointer), (void *)call->a)) {
		count_lost(LOST_USER_READ);
		goto out;
	}
	if (shape == ALLOC_PITCH) { /* known only now, and written where the second argument points */
		if (!more || bpf_probe_read_user(&bytes, sizeof(bytes), (void *)call->b)) {
			count_lost(LOST_USER_READ);
			goto out;
		}
		bytes *= more->a;
	}
	add_allocation(&id, pointer, bytes, COOKIE_DETAIL(call->c), device);
out:
	bpf_map_delete_elem(&calls, &key);
	return 0;
}

SEC("uretprobe")
int memory_free_return(struct pt_regs *ctx)
{
	struct process_id id = this_process();
	struct call_key key = {.pid_tgid = bpf_get_current_pid_tgid(), .role = CALL_FREE};
	struct call *call = bpf_map_lookup_elem(&calls, &key);

	if (!call)
		return 0;
	if (PT_REGS_RC(ctx) == 0)
		remove_allocation(&id, call->a);
	bpf_map_delete_elem(&calls, &key);
	return 0;
}
