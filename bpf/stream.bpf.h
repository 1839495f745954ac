/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Which stream a call is for, which capture that is part of, and what is queued in it. */
#pragma once
#include "maps.bpf.h"

/* One name for each stream: 0 is the default stream that the call's form means, the thread's own or the legacy one. */
static __always_inline __u64 stream_named(__u64 handle, __u64 cookie)
{
	if (handle == STREAM_PER_THREAD || (!handle && COOKIE_PER_THREAD(cookie)))
		return STREAM_OF_THREAD((__u32)bpf_get_current_pid_tgid());
	return handle ? handle : STREAM_LEGACY;
}

/* The stream that a call is for; its place among the arguments is in the cookie. */
static __always_inline __u64 stream_of(struct pt_regs *ctx, __u64 cookie)
{
	struct arguments arguments = read_arguments(ctx);

	switch (COOKIE_STREAM(cookie)) {
	case 1:
		return stream_named(arguments.first, cookie);
	case 2:
		return stream_named(arguments.second, cookie);
	case 3:
		return stream_named(arguments.third, cookie);
	case 4:
		return stream_named(arguments.fourth, cookie);
	case 5:
		return stream_named(arguments.fifth, cookie);
	case 6:
		return stream_named(ARGUMENT_6(ctx), cookie);
	case 8:
		return stream_named(ARGUMENT_8(ctx), cookie);
	case 9:
		return stream_named(ARGUMENT_9(ctx), cookie);
	}
	return stream_named(0, cookie);
}

static __always_inline struct graph *capture_at(const struct process_id *id, __u64 stream)
{
	struct graph_key key = {.process = *id, .handle = stream};

	return bpf_map_lookup_elem(&captures, &key);
}

/* The stream whose capture this one is part of; 0: none, its work runs. */
static __always_inline __u64 origin_of(const struct process_id *id, const struct process *process, __u64 stream)
{
	struct graph_key key = {.process = *id, .handle = stream};
	struct joined *joined;
	struct graph *capture;

	if (!process || process->captures <= 0)
		return 0;
	if (capture_at(id, stream))
		return stream;
	joined = bpf_map_lookup_elem(&joins, &key);
	capture = joined ? capture_at(id, joined->origin) : NULL;
	return capture && capture->made_ns == joined->capture_ns ? joined->origin : 0;
}

/* The capture that a call for this stream becomes part of; NULL: none, it runs. */
static __always_inline struct graph *find_capture(const struct process_id *id, const struct process *process,
						  __u64 stream)
{
	__u64 origin = origin_of(id, process, stream);

	return origin ? capture_at(id, origin) : NULL;
}

/* Whether it and the legacy default stream wait for each other. One that was made before the probes were there is. */
static __always_inline int is_blocking(const struct process_id *id, __u64 stream)
{
	struct graph_key key = {.process = *id, .handle = stream};

	return stream != STREAM_ANY && !bpf_map_lookup_elem(&non_blocking, &key);
}

/* Whether what was launched into `one` before is done when what is launched into `other` now is. */
static __always_inline int precedes(const struct process_id *id, __u64 one, __u64 other)
{
	if (one == STREAM_LEGACY)
		return is_blocking(id, other);
	return other == STREAM_LEGACY && is_blocking(id, one);
}

/* What follows is verified once, not at each call: no inline functions. Of the process or the thread that runs. */

static __always_inline struct queued_streams *own_streams(int of_process)
{
	struct process_id id = this_process();
	struct process *process = of_process ? bpf_map_lookup_elem(&processes, &id) : NULL;
	struct thread *thread = of_process ? NULL : this_thread();

	if (process) {
		barrier_var(process); /* or clang adds the offset before the check, which the verifier refuses */
		return &process->streams;
	}
	if (thread) {
		barrier_var(thread);
		return &thread->streams;
	}
	return NULL;
}

/* A launch, where its stream is not the only one: it is where the work of those ends that it waits for. */
__noinline int add_stream(__u64 stream, __u64 now, int of_process)
{
	struct process_id id = this_process();
	struct queued_streams *streams = own_streams(of_process);
	struct queued *place = NULL;
	int others = 0;

	if (!streams)
		return 0;
	for (__u32 i = 0; i < MOST_STREAMS; i++) {
		struct queued *one = &streams->list[i];

		if (one->stream && (one->stream == stream || precedes(&id, one->stream, stream)))
			one->stream = 0;
		if (one->stream)
			others = 1;
		else if (!place)
			place = one;
	}
	if (!place) {
		place = &streams->list[0];
		stream = STREAM_ANY;
	}
	place->stream = stream;
	place->last_ns = now;
	streams->only = others ? 0 : stream;
	return 0;
}

static __always_inline void note_stream(struct queued_streams *streams, __u64 stream, __u64 now, int of_process)
{
	if (streams->only == stream)
		streams->list[0].last_ns = now;
	else
		add_stream(stream, now, of_process);
}

/* `stream` waits for the event: who waits for it waits for that too. */
__noinline int take_over(__u64 event, __u64 stream, int of_process)
{
	struct graph_key key = {.process = this_process(), .handle = event};
	struct event_record *recorded = bpf_map_lookup_elem(&recorded_events, &key);
	struct queued_streams *streams = own_streams(of_process);

	if (!streams || !recorded)
		return 0;
	streams->only = 0;
	for (__u32 i = 0; i < MOST_STREAMS; i++) {
		struct queued *one = &streams->list[i];

		if (one->stream == recorded->stream && one->last_ns <= recorded->at_ns)
			one->stream = stream;
	}
	return 0;
}

/* Strikes out what a wait for the stream has drained of what was launched by then: true when nothing is left. */
__noinline int drain(__u64 stream, __u64 until_ns, int of_process)
{
	struct process_id id = this_process();
	struct queued_streams *streams = own_streams(of_process);
	int is_empty = 1;

	if (!streams)
		return 1;
	streams->only = 0;
	for (__u32 i = 0; i < MOST_STREAMS; i++) {
		struct queued *one = &streams->list[i];

		if (!one->stream)
			continue;
		if (one->last_ns <= until_ns && (stream == STREAM_ANY || one->stream == stream ||
						 (stream == STREAM_LEGACY && is_blocking(&id, one->stream))))
			one->stream = 0;
		else
			is_empty = 0;
	}
	return is_empty;
}

static __always_inline void forget_streams(struct queued_streams *streams)
{
	streams->only = 0;
	for (__u32 i = 0; i < MOST_STREAMS; i++)
		streams->list[i].stream = 0;
}
