// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "maps.bpf.h"

struct copy_2d { /* CUDA_MEMCPY2D: what decides size and direction */
	__u64 src_x, src_y;
	__u32 src_type, _pad0;
	__u64 src_host, src_device, src_array, src_pitch;
	__u64 dst_x, dst_y;
	__u32 dst_type, _pad1;
	__u64 dst_host, dst_device, dst_array, dst_pitch;
	__u64 width_bytes, height;
};

#define MEMORYTYPE_HOST 1
#define MEMORYTYPE_UNIFIED 4

static __always_inline __u32 direction_2d(const struct copy_2d *copy)
{
	if (copy->src_type == MEMORYTYPE_UNIFIED || copy->dst_type == MEMORYTYPE_UNIFIED)
		return COPY_UNKNOWN;
	if (copy->src_type == MEMORYTYPE_HOST)
		return COPY_HOST_TO_DEVICE;
	return copy->dst_type == MEMORYTYPE_HOST ? COPY_DEVICE_TO_HOST : COPY_DEVICE_TO_DEVICE;
}

static __always_inline __u64 copy_bytes(struct pt_regs *ctx, __u32 shape, __u32 *direction)
{
	struct arguments arguments = read_arguments(ctx);
	struct copy_2d copy;

	switch (shape) {
	case COPY_BYTES_2:
		return arguments.second;
	case COPY_BYTES_3:
	case COPY_ELEMENTS_1:
		return arguments.third;
	case COPY_ELEMENTS_2:
		return arguments.third * 2;
	case COPY_ELEMENTS_4:
		return arguments.third * 4;
	case COPY_BYTES_5:
		return arguments.fifth;
	case COPY_2D:
		if (bpf_probe_read_user(&copy, sizeof(copy), (void *)arguments.first)) {
			count_lost(LOST_USER_READ);
			return 0;
		}
		*direction = direction_2d(&copy);
		return copy.width_bytes * copy.height;
	}
	return 0;
}

static __always_inline void count_copy(struct pt_regs *ctx, __u64 cookie, struct process_id *id)
{
	struct copy_key key = {.process = *id, .device = current_device(), .direction = COOKIE_DETAIL(cookie) & 0xff};
	struct copy_value initial = {};
	struct copy_value *value;
	__u64 bytes = copy_bytes(ctx, COOKIE_SHAPE(cookie), &key.direction);

	value = find_or_add(&copies, &key, &initial, LOST_COPY);
	if (!value)
		return;
	__sync_fetch_and_add(&value->bytes, bytes);
	__sync_fetch_and_add(&value->calls, 1);
}

SEC("uprobe")
int copy_enter(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();

	if (is_duplicate(ctx, cookie))
		return 0;
	find_process(&id, cookie);
	count_copy(ctx, cookie, &id);
	return 0;
}

/* A copy that returns when the data has arrived: also a wait (its return is wait_return). */
SEC("uprobe")
int copy_wait_enter(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct process *process;

	if (is_duplicate(ctx, cookie))
		return 0;
	process = find_process(&id, cookie);
	count_copy(ctx, cookie, &id);
	if (process)
		begin_wait(&id, process);
	return 0;
}
