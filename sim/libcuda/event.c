/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <stdlib.h>

#define NO_MARK (~0u) /* the server leaves marks out of range alone */

struct CUevent_st {
	uint32_t magic, mark;
	unsigned flags;
	bool recorded;
	struct point at;
	struct capture_point captured; /* where it was recorded last, if that was in a capture */
};

static pthread_mutex_t events_lock = PTHREAD_MUTEX_INITIALIZER;
/* A mark that is still to be written must not be another event's already. */
static struct {
	bool used, retiring;
	struct point at;
} marks[MAX_MARKS];
static uint32_t next_mark;

static uint32_t mark_take(void)
{
	for (uint32_t i = 0; i < MAX_MARKS; i++) {
		uint32_t mark = (next_mark + i) % MAX_MARKS;

		if (marks[mark].used && marks[mark].retiring && point_reached(marks[mark].at))
			marks[mark].used = marks[mark].retiring = false;
		if (marks[mark].used)
			continue;
		marks[mark].used = true;
		next_mark = mark + 1;
		return mark;
	}
	return NO_MARK;
}

static bool valid(CUevent event)
{
	return event && event->magic == MAGIC_EVENT;
}

API cuEventCreate(CUevent *out, unsigned flags)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);
	struct CUevent_st *event;

	if (result != CUDA_SUCCESS)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	event = calloc(1, sizeof(*event));
	if (!event)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*event = (struct CUevent_st){.magic = MAGIC_EVENT, .mark = NO_MARK, .flags = flags};
	if (!(flags & CU_EVENT_DISABLE_TIMING)) {
		pthread_mutex_lock(&events_lock);
		event->mark = mark_take();
		pthread_mutex_unlock(&events_lock);
		if (event->mark == NO_MARK) {
			free(event);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
	}
	*out = event;
	return CUDA_SUCCESS;
}

static CUresult record(CUevent event, CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_resolve(handle, &stream);
	struct capture_point captured;
	struct point at;

	if (result != CUDA_SUCCESS)
		return result;
	if (!valid(event))
		return CUDA_ERROR_INVALID_HANDLE;
	captured = capture_record(stream);
	pthread_mutex_lock(&events_lock);
	event->captured = captured;
	pthread_mutex_unlock(&events_lock);
	if (captured.capture)
		return CUDA_SUCCESS;
	if (event->mark != NO_MARK)
		atomic_store(&connection.shared->marks[event->mark], 0);
	result = ring_operation(stream, CMD_MARK, (uint64_t[4]){event->mark}, &at);
	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&events_lock);
	event->at = at;
	event->recorded = true;
	pthread_mutex_unlock(&events_lock);
	return CUDA_SUCCESS;
}

/* An event that was never recorded counts as reached. */
static CUresult look(CUevent event, struct point *at, bool *recorded)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!valid(event))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&events_lock);
	*at = event->at;
	*recorded = event->recorded;
	if (event->captured.capture)
		result = CUDA_ERROR_CAPTURED_EVENT;
	pthread_mutex_unlock(&events_lock);
	return result;
}

/* External: in a capture a node of its own, which ties no streams; recording by graphs is not modelled. */
static CUresult record_with_flags(CUevent event, CUstream handle, unsigned flags)
{
	struct CUstream_st *stream;
	CUresult result = stream_resolve(handle, &stream);

	if (result == CUDA_SUCCESS && flags & ~CU_EVENT_RECORD_EXTERNAL)
		return CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS && flags && stream->capture)
		return CUDA_ERROR_NOT_SUPPORTED;
	return result == CUDA_SUCCESS ? record(event, handle) : result;
}

API2(cuEventRecord, cuEventRecord_ptsz, (CUevent event, CUstream stream), record(event, stream))
API2(cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz, (CUevent event, CUstream stream, unsigned flags),
     record_with_flags(event, stream, flags))

API cuEventSynchronize(CUevent event)
{
	struct point at;
	bool recorded;
	CUresult result = look(event, &at, &recorded);

	if (result == CUDA_SUCCESS)
		result = call_pass();
	return result == CUDA_SUCCESS && recorded ? point_wait(at) : result;
}

API cuEventQuery(CUevent event)
{
	struct point at;
	bool recorded;
	CUresult result = look(event, &at, &recorded);

	if (result == CUDA_SUCCESS)
		result = call_pass();
	return result == CUDA_SUCCESS && recorded ? point_query(at) : result;
}

static CUresult time_of(CUevent event, uint64_t *at_ns)
{
	struct point at;
	bool recorded;
	CUresult result = look(event, &at, &recorded);

	if (result != CUDA_SUCCESS)
		return result;
	if (!recorded || event->mark == NO_MARK)
		return CUDA_ERROR_INVALID_HANDLE;
	result = point_query(at);
	if (result == CUDA_SUCCESS)
		*at_ns = atomic_load(&connection.shared->marks[event->mark]);
	return result == CUDA_SUCCESS && !*at_ns ? CUDA_ERROR_NOT_READY : result;
}

API cuEventElapsedTime(float *ms, CUevent start, CUevent end)
{
	uint64_t from_ns = 0, to_ns = 0;
	CUresult result = time_of(start, &from_ns);

	if (result == CUDA_SUCCESS)
		result = time_of(end, &to_ns);
	if (result != CUDA_SUCCESS)
		return result;
	if (!ms)
		return CUDA_ERROR_INVALID_VALUE;
	*ms = (float)((double)(int64_t)(to_ns - from_ns) / 1e6);
	return CUDA_SUCCESS;
}

API cuEventDestroy(CUevent event)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!valid(event))
		return CUDA_ERROR_INVALID_HANDLE;
	pthread_mutex_lock(&events_lock);
	event->magic = 0;
	if (event->mark != NO_MARK) {
		marks[event->mark].used = event->recorded;
		marks[event->mark].retiring = event->recorded;
		marks[event->mark].at = event->at;
	}
	pthread_mutex_unlock(&events_lock);
	free(event);
	return CUDA_SUCCESS;
}

static CUresult wait_for_event(CUstream handle, CUevent event)
{
	struct capture_point captured = {0};
	struct CUstream_st *stream;
	struct point at;
	bool recorded;
	CUresult result = look(event, &at, &recorded);

	if (result == CUDA_ERROR_CAPTURED_EVENT) {
		pthread_mutex_lock(&events_lock);
		captured = event->captured;
		pthread_mutex_unlock(&events_lock);
		result = CUDA_SUCCESS;
	}
	if (result == CUDA_SUCCESS)
		result = stream_resolve(handle, &stream);
	if (result != CUDA_SUCCESS)
		return result;
	if (captured.capture || stream->capture)
		return capture_wait(stream, captured);
	if (!recorded || at.stream == stream->number || point_reached(at))
		return CUDA_SUCCESS;
	return ring_operation(stream, CMD_WAIT, (uint64_t[4]){at.stream, at.sequence}, NULL);
}

API2(cuStreamWaitEvent, cuStreamWaitEvent_ptsz, (CUstream stream, CUevent event, unsigned flags),
     ((void)flags, wait_for_event(stream, event)))
