// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "bounds.bpf.h"
#include "context.bpf.c"
#include "copy.bpf.h"
#include "graph.bpf.h"
#include "pcie.bpf.c"
#include "process.bpf.h"
#include "wait.bpf.c"

/*
 * Of the process that runs. No always_inline and not static, as those below: the kernel verifies such a function once,
 * and not at each call and in each turn of a loop, which was most of the time that loading the programs took.
 */
__noinline int count_copy(__u64 stream, __u32 direction, __u64 bytes)
{
	struct process_id id = this_process();
	struct graph *capture = find_capture(&id, bpf_map_lookup_elem(&processes, &id), stream);

	if (capture)
		add_copy(&capture->work, direction, bytes);
	else
		book_copies(&id, current_device(), direction, bytes, 1);
	return 0;
}

/*
 * Between memory of two devices: traffic of both. 0 where one is not known, or both are the same, which makes it one on
 * the device; what a graph does is, too. That one is counted by the caller: the chain of calls from here would take all
 * 512 bytes of stack that Linux 6.1 allows.
 */
__noinline int count_peers(__u32 to, __u32 from, __u64 bytes, __u64 stream)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);

	if (to == from || to == DEVICE_UNKNOWN || from == DEVICE_UNKNOWN || find_capture(&id, process, stream))
		return 0;
	book_copies(&id, from, COPY_TO_PEER, bytes, 1);
	book_copies(&id, to, COPY_FROM_PEER, bytes, 1);
	return 1;
}

static __always_inline void count_between(__u32 to, __u32 from, __u64 bytes, __u64 stream)
{
	if (!count_peers(to, from, bytes, stream))
		count_copy(stream, COPY_DEVICE_TO_DEVICE, bytes);
}

static __always_inline __u32 device_of_context(const struct process_id *id, __u64 handle)
{
	struct context *context = find_context(id, handle);

	return context ? context->device : DEVICE_UNKNOWN;
}

/* Whose memory begins there. What lies inside an allocation is not found. */
static __always_inline __u32 device_of_memory(const struct process_id *id, __u64 address)
{
	struct allocation_key key = {.process = *id, .space = SPACE_ADDRESS, .pointer = address};
	struct allocation *allocation = bpf_map_lookup_elem(&allocations, &key);

	return allocation ? allocation->device : DEVICE_UNKNOWN;
}

static __always_inline void count_between_addresses(const struct process_id *id, __u64 destination, __u64 source,
						    __u64 bytes, __u64 stream)
{
	__u32 to = device_of_memory(id, destination);

	count_between(to, to == DEVICE_UNKNOWN ? DEVICE_UNKNOWN : device_of_memory(id, source), bytes, stream);
}

/* The same by addresses. Returns the direction. */
__noinline int count_one_copy(__u64 destination, __u64 source, __u64 bytes, __u64 stream)
{
	struct process_id id = this_process();
	__u32 direction = unified_direction(destination, source);

	if (direction == COPY_DEVICE_TO_DEVICE)
		count_between_addresses(&id, destination, source, bytes, stream);
	else
		count_copy(stream, direction, bytes);
	return direction;
}

/* A copy that could not be judged when its call began. */
static __always_inline void pace_late(__u64 stream, __u32 direction, __u64 bytes)
{
	struct sized_copy copy = {.bytes = bytes, .direction = direction};

	pace_copy(&copy, stream, 0);
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
	case COPY_PEER:
		return narrowed(arguments.fifth, detail);
	case COPY_ELEMENTS:
		return product(narrowed(arguments.third, detail), COPY_ELEMENT(detail));
	case COPY_ELEMENTS_2D:
		return product(product(narrowed(arguments.fourth, detail), narrowed(arguments.fifth, detail)),
			       COPY_ELEMENT(detail));
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
	case COPY_3D_PEER:
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

/* True of a list, whose arguments are kept for its return. */
static __always_inline int keep_list(struct pt_regs *ctx, __u64 cookie, __u64 stream)
{
	struct arguments arguments = read_arguments(ctx);
	struct call call = {.a = arguments.first, .b = arguments.second, .stream = stream, .cookie = cookie};

	switch (COOKIE_SHAPE(cookie)) {
	case COPY_BATCH:
		call.c = arguments.third;
		call.d = arguments.fourth;
		break;
	case COPY_BATCH_3D:
		call.d = arguments.first;
		call.a = arguments.second;
		break;
	case COPY_OPERATION_3D:
		call.d = 1;
		break;
	default:
		return 0;
	}
	keep_call(CALL_COPY, &call);
	return 1;
}

#define PEER_SOURCE_CONTEXT 64 /* in CUDA_MEMCPY3D_PEER */
#define PEER_DESTINATION_CONTEXT 152

/* The devices of a copy that names contexts: that of the destination in the upper half. */
static __always_inline __u64 peers(struct pt_regs *ctx, __u32 shape, const struct process_id *id)
{
	struct arguments arguments = read_arguments(ctx);
	__u64 to = arguments.second, from = arguments.fourth;

	if (shape == COPY_3D_PEER) {
		to = read_result(arguments.first + PEER_DESTINATION_CONTEXT);
		from = read_result(arguments.first + PEER_SOURCE_CONTEXT);
	}
	return (__u64)device_of_context(id, to) << 32 | device_of_context(id, from);
}

/* Paces and counts the copy, or keeps it for the return where only that can tell its direction. */
static __always_inline void enter_copy(struct pt_regs *ctx, __u64 cookie, const struct process_id *id, __u64 stream,
				       __u32 how)
{
	struct arguments arguments = read_arguments(ctx);
	struct sized_copy copy = {};
	struct call call = {.stream = stream, .cookie = cookie};
	__u32 shape = COOKIE_SHAPE(cookie);
	int paced;

	if (keep_list(ctx, cookie, stream))
		return;
	size_copy(ctx, cookie, &copy);
	paced = pace_copy(&copy, stream, COPY_ENTERS | how);
	if (shape == COPY_PEER || shape == COPY_3D_PEER)
		call.d = peers(ctx, shape, id);
	if (!copy.source && !copy.destination) {
		if (copy.direction == COPY_DEVICE_TO_DEVICE && (shape == COPY_PEER || shape == COPY_3D_PEER))
			count_between(call.d >> 32, (__u32)call.d, copy.bytes, call.stream);
		else if (copy.direction == COPY_DEVICE_TO_DEVICE && shape == COPY_BYTES_3)
			count_between_addresses(id, arguments.first, arguments.second, copy.bytes, call.stream);
		else
			count_copy(call.stream, copy.direction, copy.bytes);
		return;
	}
	call.a = copy.destination;
	call.b = copy.source;
	call.c = copy.bytes;
	if (shape != COPY_3D_PEER)
		call.d = paced;
	keep_call(CALL_COPY, &call);
}

static __always_inline void count_batch(const struct call *call)
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
		pace_late(call->stream, count_one_copy(one[0], one[1], one[2], call->stream), one[2]);
	}
	if (call->d > MOST_OF_BATCH)
		count_lost(LOST_BATCH);
}

#define OPERAND_ARRAY 2
#define OPERATION_BYTES 112

struct operand { /* CUmemcpy3DOperand */
	__u32 type, _pad;
	__u64 address; /* of memory, or the array's handle */
	__u64 rest[3];
};

struct operation { /* the head of CUDA_MEMCPY3D_BATCH_OP */
	struct operand source, destination;
	__u64 width, height, depth; /* in elements where an array takes part */
};

/* Of an array that was made before the probes were there it is not known: then at least so many bytes are counted. */
static __always_inline __u64 element_bytes(const struct process_id *id, const struct operand *operand)
{
	struct allocation_key key = {.process = *id, .space = SPACE_ARRAY, .pointer = operand->address};
	struct allocation *array;

	if (operand->type != OPERAND_ARRAY)
		return 1;
	array = bpf_map_lookup_elem(&allocations, &key);
	return array && array->element_bytes ? array->element_bytes : 1;
}

/* 0 of an array: its handle is no address, though something may be readable there. */
static __always_inline __u64 address_of(const struct operand *operand)
{
	return operand->type == OPERAND_ARRAY ? 0 : operand->address;
}

static __always_inline void count_operations(const struct process_id *id, const struct call *call)
{
	for (__u32 i = 0; i < MOST_OF_BATCH; i++) {
		struct operation one = {};
		__u64 bytes, from, to;

		if (i >= call->d)
			break;
		if (bpf_probe_read_user(&one, sizeof(one), (void *)call->a + OPERATION_BYTES * i)) {
			count_lost(LOST_USER_READ);
			break;
		}
		from = element_bytes(id, &one.source);
		to = element_bytes(id, &one.destination);
		bytes = product(product(product(one.width, one.height), one.depth), from > to ? from : to);
		pace_late(call->stream,
			  count_one_copy(address_of(&one.destination), address_of(&one.source), bytes, call->stream),
			  bytes);
	}
	if (call->d > MOST_OF_BATCH)
		count_lost(LOST_BATCH);
}

/* 1 if the number there is `i`, 0 if not, below 0 if it cannot be read. What it returns, the verifier does not follow. */
__noinline int is_number(__u64 address, __u32 i)
{
	__u64 number = 0;

	if (bpf_probe_read_user(&number, sizeof(number), (void *)address))
		return -1;
	return number == i;
}

struct prefetches {
	__u64 sizes, count, locations, firsts, location_count, stream;
};

/* Each location is for the prefetches from the one that its index names. */
static __always_inline void count_prefetches(const struct prefetches *list)
{
	struct location location = {};
	__u64 next = 0;

	for (__u32 i = 0; i < MOST_OF_BATCH; i++) {
		__u64 bytes = 0;
		__u32 direction;
		int is_first = 0;

		if (i >= list->count)
			break;
		if (next < list->location_count)
			is_first = is_number(list->firsts + 8 * next, i);
		if (is_first < 0)
			goto unreadable;
		if (is_first && bpf_probe_read_user(&location, sizeof(location), (void *)list->locations + 8 * next))
			goto unreadable;
		next += is_first;
		if (bpf_probe_read_user(&bytes, 8, (void *)list->sizes + 8 * i))
			goto unreadable;
		direction = location.type == LOCATION_DEVICE ? COPY_HOST_TO_DEVICE : COPY_DEVICE_TO_HOST;
		count_copy(list->stream, direction, bytes);
		pace_late(list->stream, direction, bytes);
	}
	if (list->count > MOST_OF_BATCH)
		count_lost(LOST_BATCH);
	return;
unreadable:
	count_lost(LOST_USER_READ);
}

static __always_inline void return_copy(struct pt_regs *ctx, const struct process_id *id)
{
	struct call call;
	__u32 shape, direction;

	if (!take_call(CALL_COPY, &call) || !succeeded(ctx))
		return;
	shape = COOKIE_SHAPE(call.cookie);
	if (shape == COPY_BATCH) {
		count_batch(&call);
		return;
	}
	if (shape == COPY_BATCH_3D || shape == COPY_OPERATION_3D) {
		count_operations(id, &call);
		return;
	}
	if (shape == COPY_UNIFIED) {
		direction = count_one_copy(call.a, call.b, call.c, call.stream);
		if (!call.d)
			pace_late(call.stream, direction, call.c);
		return;
	}
	direction = unified_direction(call.a, call.b);
	if (shape == COPY_3D_PEER && direction == COPY_DEVICE_TO_DEVICE)
		count_between(call.d >> 32, (__u32)call.d, call.c, call.stream);
	else
		count_copy(call.stream, direction, call.c);
	if (shape != COPY_3D_PEER && !call.d)
		pace_late(call.stream, direction, call.c);
}

PROBE("uprobe", copy_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();

	if (begin_call(ctx, cookie, &id))
		enter_copy(ctx, cookie, &id, stream_of(ctx, cookie), 0);
	return 0;
}

PROBE("uretprobe", copy_return)
{
	struct process_id id = this_process();

	return_copy(ctx, &id);
	return 0;
}

PROBE("uprobe", prefetches_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	struct prefetches list = {arguments.second, arguments.third, arguments.fourth,
				  arguments.fifth,  ARGUMENT_6(ctx), stream_of(ctx, cookie)};

	if (begin_call(ctx, cookie, &id))
		count_prefetches(&list);
	return 0;
}

/* A copy that returns when the data has arrived: also a wait. */
PROBE("uprobe", copy_wait_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct process *process = find_process(&id, cookie);
	struct thread *thread = own_thread();
	__u64 stream = stream_of(ctx, cookie);

	if (is_duplicate_of(thread, ctx, cookie))
		return 0;
	enter_copy(ctx, cookie, &id, stream, COPY_BLOCKS);
	if (process && thread)
		begin_wait(&id, process, thread, stream, bpf_ktime_get_ns());
	return 0;
}

PROBE("uretprobe", copy_wait_return)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);

	return_copy(ctx, &id);
	if (process)
		end_wait(&id, process, succeeded(ctx));
	return 0;
}
