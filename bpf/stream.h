/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Streams: whether a call's work runs or becomes part of a graph, and which work a wait has drained, follow the stream
 * that the call names and the events that tie streams to each other. CUDA driver API, "Stream synchronization behavior".
 */
#pragma once
#include "abi.h"

enum stream_shape {
	STREAM_CREATE = 1, /* (out stream, flags, …) */
	STREAM_DESTROY, /* (stream) */
	STREAM_WAIT, /* (stream, event, flags) */
	EVENT_RECORD, /* (event, stream) */
	EVENT_RECORD_FLAGS, /* (event, stream, flags) */
};

#define STREAM_NON_BLOCKING 1 /* CU_STREAM_NON_BLOCKING: the legacy default stream does not wait for it */
#define EVENT_EXTERNAL 1 /* CU_EVENT_RECORD_EXTERNAL, CU_EVENT_WAIT_EXTERNAL: a node of its own, which joins nothing */

/* CU_STREAM_LEGACY, CU_STREAM_PER_THREAD. Handles of streams are aligned addresses; that of each thread has its tid. */
#define STREAM_LEGACY 1ull
#define STREAM_PER_THREAD 2ull
#define STREAM_OF_THREAD(tid) ((__u64)(tid) << 16 | STREAM_PER_THREAD)
#define STREAM_IS_OF_THREAD(handle) (((handle)&0xffff) == STREAM_PER_THREAD)
#define STREAM_ANY (~0ull) /* of more streams than have a place */

/* What an event stands for: the work of a stream up to then. */
struct event_record {
	__u64 stream;
	__u64 at_ns;
	__u64 origin; /* the stream whose capture it was recorded in … */
	__u64 capture_ns; /* … and when that began; 0: in none */
};

/* Of a stream that the legacy default stream does not wait for. */
struct non_blocking {
	__u64 made_ns;
};

/* A stream that waited for an event of a capture is part of it, while that lasts. */
struct joined {
	__u64 origin;
	__u64 capture_ns;
};

/* A stream with work that no wait has drained. */
struct queued {
	__u64 stream; /* 0: none */
	__u64 last_ns; /* the latest launch */
};

#define MOST_STREAMS 4 /* with a place of their own in one request */

struct queued_streams {
	struct queued list[MOST_STREAMS];
	__u64 only; /* the first one's, where there is no other; 0: look */
};

/* What a wait waits for. */
struct awaited {
	__u64 stream; /* STREAM_ANY: all of the context */
	__u64 until_ns; /* what was launched by then; 0: nothing that is known */
};
