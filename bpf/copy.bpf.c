// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "context.bpf.c"
#include "copy.bpf.h"
#include "graph.bpf.h"
#include "process.bpf.h"
#include "wait.bpf.c"

static __always_inline void count_copy(const struct process_id *id, const struct process *process, __u32 direction,
				       __u64 bytes)
{
	struct graph *capture = find_capture(id, process, 0);

	if (capture)
		add_copy(capture, direction, bytes);
	else
		book_copies(id, current_device(), direction, bytes, 1);
}

#define DEVICE_CPU 0xffffffffu /* CU_DEVICE_CPU */

static __always_inline __u32 prefetch_direction(__u32 shape, __u64 argument)
{
	if (shape == COPY_PREFETCH_2) /* CUmemLocation, in one register: type, then id */
		return (__u32)argument == LOCATION_DEVICE ? COPY_HOST_TO_DEVICE : COPY_DEVICE_TO_HOST;
	return (__u32)argument == DEVICE_CPU ? COPY_DEVICE_TO_HOST : COPY_HOST_TO_DEVICE;
}

static __always_inline __u64 narrowed(__u64 value, __u32 detail)
{
	return COPY_IS_NARROW(detail) ? (__u32)value : value;
}

/* Of the shapes that have all in their arguments. */
static __always_inline __u64 bytes_argument(struct pt_regs *ctx, __u32 shape, __u32 detail)
{
	struct arguments arguments = read_arguments(ctx);

	switch (shape) {
	case COPY_BYTES_2:
	case COPY_PREFETCH:
	case COPY_PREFETCH_2:
		return narrowed(arguments.second, detail);
	case COPY_BYTES_3:
	case COPY_UNIFIED:
		return narrowed(arguments.third, detail);
	case COPY_BYTES_4:
		return narrowed(arguments.fourth, detail);
	case COPY_BYTES_5:
		return narrowed(arguments.fifth, detail);
	case COPY_ELEMENTS:
		return narrowed(arguments.third, detail) * COPY_ELEMENT(detail);
	case COPY_ELEMENTS_2D:
		return narrowed(arguments.fourth, detail) * narrowed(arguments.fifth, detail) * COPY_ELEMENT(detail);
	}
	return 0;
}

static __always_inline void size_copy(struct pt_regs *ctx, __u64 cookie, struct sized_copy *copy)
{
	struct arguments arguments = read_arguments(ctx);
	__u32 shape = COOKIE_SHAPE(cookie), detail = COOKIE_DETAIL(cookie);

	copy->direction = COPY_DIRECTION(detail);
	switch (shape) {
	case COPY_2D:
		read_descriptor(copy, arguments.first, &(struct descriptor){16, 32, 72, 88, 112, 2, 0});
		return;
	case COPY_2D_NARROW:
		read_descriptor(copy, arguments.first, &(struct descriptor){8, 24, 52, 64, 84, 2, 1});
		return;
	case COPY_3D:
		read_descriptor(copy, arguments.first, &(struct descriptor){32, 48, 120, 136, 176, 3, 0});
		return;
	case COPY_3D_NARROW:
		read_descriptor(copy, arguments.first, &(struct descriptor){16, 32, 80, 96, 128, 3, 1});
		return;
	case COPY_UNIFIED:
		copy->destination = arguments.first;
		copy->source = arguments.second;
		break;
	case COPY_PREFETCH:
	case COPY_PREFETCH_2:
		copy->direction = prefetch_direction(shape, arguments.third);
		break;
	}
	copy->bytes = bytes_argument(ctx, shape, detail);
}

/* Counts the copy, or keeps it for the return where only that can tell its direction. */
static __always_inline void enter_copy(struct pt_regs *ctx, __u64 cookie, const struct process_id *id,
				       const struct process *process)
{
	struct sized_copy copy = {};
	struct call call = {.cookie = cookie};

	if (COOKIE_SHAPE(cookie) == COPY_BATCH) {
		struct arguments arguments = read_arguments(ctx);

		call.a = arguments.first;
		call.b = arguments.second;
		call.c = arguments.third;
		call.d = arguments.fourth;
		keep_call(CALL_COPY, &call);
		return;
	}
	size_copy(ctx, cookie, &copy);
	if (!copy.source && !copy.destination) {
		count_copy(id, process, copy.direction, copy.bytes);
		return;
	}
	call.a = copy.destination;
	call.b = copy.source;
	call.c = copy.bytes;
	keep_call(CALL_COPY, &call);
}

static __always_inline void count_batch(const struct process_id *id, const struct process *process,
					const struct call *call)
{
	for (__u32 i = 0; i < MOST_OF_BATCH; i++) {
		__u64 one[3] = {};

		if (i >= call->d)
			break;
		if (bpf_probe_read_user(&one[0], 8, (void *)call->a + 8 * i) ||
		    bpf_probe_read_user(&one[1], 8, (void *)call->b + 8 * i) ||
		    bpf_probe_read_user(&one[2], 8, (void *)call->c + 8 * i)) {
			count_lost(LOST_USER_READ);
			break;
		}
		count_copy(id, process, unified_direction(one[0], one[1]), one[2]);
	}
	if (call->d > MOST_OF_BATCH)
		count_lost(LOST_BATCH);
}

static __always_inline void return_copy(struct pt_regs *ctx, const struct process_id *id)
{
	struct process *process = bpf_map_lookup_elem(&processes, id);
	struct call call;

	if (!take_call(CALL_COPY, &call) || !succeeded(ctx))
		return;
	if (COOKIE_SHAPE(call.cookie) == COPY_BATCH)
		count_batch(id, process, &call);
	else
		count_copy(id, process, unified_direction(call.a, call.b), call.c);
}

SEC("uprobe")
int copy_enter(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct process *process = find_process(&id, cookie);

	if (!is_duplicate(ctx, cookie, &id, process))
		enter_copy(ctx, cookie, &id, process);
	return 0;
}

SEC("uretprobe")
int copy_return(struct pt_regs *ctx)
{
	struct process_id id = this_process();

	return_copy(ctx, &id);
	return 0;
}

/* A copy that returns when the data has arrived: also a wait. */
SEC("uprobe")
int copy_wait_enter(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct process *process = find_process(&id, cookie);

	if (is_duplicate(ctx, cookie, &id, process))
		return 0;
	enter_copy(ctx, cookie, &id, process);
	if (process)
		begin_wait(&id, process);
	return 0;
}

SEC("uretprobe")
int copy_wait_return(struct pt_regs *ctx)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);

	return_copy(ctx, &id);
	if (process)
		end_wait(&id, process, succeeded(ctx));
	return 0;
}
