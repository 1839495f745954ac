// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "process.bpf.h"
#include "stream.bpf.h"

/* Its handle may be another stream's afterwards, in which work runs. */
static __always_inline void forget_stream(const struct process_id *id, struct process *process, __u64 stream)
{
	struct graph_key key = {.process = *id, .handle = stream};

	drop(&non_blocking, &key, LOST_STREAM);
	drop(&joins, &key, LOST_STREAM);
	if (!process || process->captures <= 0 || !capture_at(id, stream))
		return;
	if (!drop(&captures, &key, LOST_NEW_GRAPH))
		__sync_fetch_and_add(&process->captures, -1);
}

static __always_inline void create_stream(const struct process_id *id, __u64 stream, __u64 flags)
{
	struct graph_key key = {.process = *id, .handle = stream};
	struct non_blocking made = {.made_ns = bpf_ktime_get_ns()};

	if (flags & STREAM_NON_BLOCKING)
		put(&non_blocking, &key, &made, LOST_STREAM);
}

static __always_inline void record_event(const struct process_id *id, const struct process *process,
					 const struct call *call)
{
	struct graph_key key = {.process = *id, .handle = call->a};
	struct event_record event = {.stream = call->b, .at_ns = call->d};
	struct graph *capture;

	if (call->c & EVENT_EXTERNAL)
		return;
	event.origin = origin_of(id, process, call->b);
	capture = event.origin ? capture_at(id, event.origin) : NULL;
	if (capture)
		event.capture_ns = capture->made_ns;
	put(&recorded_events, &key, &event, LOST_RECORD);
}

static __always_inline void wait_for_event(const struct process_id *id, struct process *process,
					   const struct call *call)
{
	struct graph_key key = {.process = *id, .handle = call->a}, stream = {.process = *id, .handle = call->b};
	struct event_record *event = bpf_map_lookup_elem(&recorded_events, &key);
	struct joined joined = {};

	if (!event || !process || call->c & EVENT_EXTERNAL)
		return;
	if (event->capture_ns) {
		joined.origin = event->origin;
		joined.capture_ns = event->capture_ns;
		if (process->captures > 0)
			put(&joins, &stream, &joined, LOST_STREAM);
		return;
	}
	take_over(call->a, call->b, 1);
	take_over(call->a, call->b, 0);
}

PROBE("uprobe", stream_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct process *process = find_process(&id, cookie);
	struct arguments arguments = read_arguments(ctx);
	struct call call = {.a = arguments.first, .b = stream_of(ctx, cookie), .cookie = cookie};
	__u32 shape = COOKIE_SHAPE(cookie);

	if (is_duplicate(ctx, cookie))
		return 0;
	if (shape == STREAM_DESTROY) {
		forget_stream(&id, process, call.b);
		return 0;
	}
	call.d = bpf_ktime_get_ns();
	if (shape == STREAM_CREATE)
		call.b = arguments.second;
	if (shape == STREAM_WAIT)
		call.a = arguments.second;
	if (shape == STREAM_WAIT || shape == EVENT_RECORD_FLAGS)
		call.c = arguments.third;
	keep_call(CALL_STREAM, &call);
	return 0;
}

PROBE("uretprobe", stream_return)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	struct call call;

	if (!take_call(CALL_STREAM, &call) || !succeeded(ctx))
		return 0;
	switch (COOKIE_SHAPE(call.cookie)) {
	case STREAM_CREATE:
		create_stream(&id, read_result(call.a), call.b);
		break;
	case STREAM_WAIT:
		wait_for_event(&id, process, &call);
		break;
	default:
		record_event(&id, process, &call);
	}
	return 0;
}
