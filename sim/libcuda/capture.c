/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Streams that write down their work instead of doing it. All streams of a capture append to one graph, in the order of the
 * calls, which obeys every dependency between them.
 */
#include "internal.h"

static pthread_mutex_t capture_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUstream_st *capturing;
static uint64_t capture_count;
static __thread CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

/* ---- all with capture_lock ---- */

static void enter(struct CUstream_st *stream, CUgraph graph, uint64_t number)
{
	stream->capture = graph;
	stream->capture_number = number;
	stream->captured = stream->joined = 0;
	stream->capture_began_here = false;
	stream->next_capturing = capturing;
	capturing = stream;
}

static void leave(struct CUstream_st *stream)
{
	struct CUstream_st **link = &capturing;

	while (*link && *link != stream)
		link = &(*link)->next_capturing;
	if (*link)
		*link = stream->next_capturing;
	stream->capture = NULL;
}

static struct CUstream_st *member(uint64_t number)
{
	struct CUstream_st *stream = capturing;

	while (stream && stream->capture_number != number)
		stream = stream->next_capturing;
	return stream;
}

/* All streams leave. False: the one that began it did not wait for the work of another. */
static bool dissolve(uint64_t number)
{
	struct CUstream_st *stream;
	bool complete = true;

	while ((stream = member(number))) {
		complete = complete && (stream->capture_began_here || stream->joined == stream->captured);
		leave(stream);
	}
	return complete;
}

/* ---- for the other files ---- */

struct capture_point capture_record(const struct CUstream_st *stream)
{
	struct capture_point point = {0};

	pthread_mutex_lock(&capture_lock);
	if (stream->capture)
		point = (struct capture_point){stream->capture_number, stream->captured, stream};
	pthread_mutex_unlock(&capture_lock);
	return point;
}

/* With capture_lock. */
static CUresult take_in(struct CUstream_st *stream, struct capture_point point)
{
	struct CUstream_st *other = capturing;

	while (other && (other->capture_number != point.capture || other != point.stream))
		other = other->next_capturing;
	if (!other)
		return CUDA_ERROR_CAPTURED_EVENT; /* that capture has ended */
	if (!stream->capture)
		enter(stream, other->capture, point.capture);
	else if (stream->capture_number != point.capture)
		return CUDA_ERROR_STREAM_CAPTURE_MERGE;
	else if (other != stream) {
		if (other->joined < point.operations)
			other->joined = point.operations;
		stream->captured++; /* a wait for this stream has to come after this */
	}
	return CUDA_SUCCESS;
}

CUresult capture_wait(struct CUstream_st *stream, struct capture_point point)
{
	CUresult result;

	if (!point.capture)
		return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
	pthread_mutex_lock(&capture_lock);
	result = take_in(stream, point);
	pthread_mutex_unlock(&capture_lock);
	return result;
}

CUresult capture_kernel(struct CUstream_st *stream, const struct kernel *kernel)
{
	CUresult result;

	pthread_mutex_lock(&capture_lock);
	stream->captured++;
	result = graph_append_kernel(stream->capture, kernel, NULL);
	pthread_mutex_unlock(&capture_lock);
	return result;
}

CUresult capture_copy(struct CUstream_st *stream, int kind, size_t bytes)
{
	CUresult result;

	pthread_mutex_lock(&capture_lock);
	stream->captured++;
	result = graph_append_copy(stream->capture, kind, bytes, NULL);
	pthread_mutex_unlock(&capture_lock);
	return result;
}

CUresult capture_allocation(struct CUstream_st *stream, size_t bytes, CUdeviceptr *pointer)
{
	CUmemLocation here = {CU_MEM_LOCATION_TYPE_DEVICE, stream->context->ordinal};
	CUresult result;

	pthread_mutex_lock(&capture_lock);
	stream->captured++;
	result = graph_append_allocation(stream->capture, here, bytes, pointer, NULL);
	pthread_mutex_unlock(&capture_lock);
	return result;
}

CUresult capture_free(struct CUstream_st *stream, CUdeviceptr pointer)
{
	CUresult result;

	pthread_mutex_lock(&capture_lock);
	stream->captured++;
	result = graph_append_free(stream->capture, pointer, NULL);
	pthread_mutex_unlock(&capture_lock);
	return result;
}

void capture_leave(struct CUstream_st *stream)
{
	CUgraph graph;

	pthread_mutex_lock(&capture_lock);
	graph = stream->capture && stream->capture_began_here ? stream->capture : NULL;
	if (graph)
		dissolve(stream->capture_number);
	else if (stream->capture)
		leave(stream);
	pthread_mutex_unlock(&capture_lock);
	if (graph && stream->capture_is_ours)
		graph_free(graph);
}

void captures_end(struct CUctx_st *context)
{
	for (;;) {
		struct CUstream_st *stream;

		pthread_mutex_lock(&capture_lock);
		for (stream = capturing; stream && stream->context != context; stream = stream->next_capturing)
			;
		pthread_mutex_unlock(&capture_lock);
		if (!stream)
			return;
		capture_leave(stream);
	}
}

/* ---- exports ---- */

/* Into `graph`, or into a new one where that is NULL. */
static CUresult begin_to(CUstream handle, CUgraph graph, CUstreamCaptureMode mode)
{
	struct CUstream_st *stream;
	bool is_new = !graph;
	CUresult result = stream_for_work(handle, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	if (stream == stream->context->null)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	result = is_new ? graph_new(&graph) : CUDA_SUCCESS;
	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&capture_lock);
	enter(stream, graph, ++capture_count);
	stream->capture_began_here = true;
	stream->capture_is_ours = is_new;
	pthread_mutex_unlock(&capture_lock);
	return CUDA_SUCCESS;
}

static CUresult begin(CUstream handle, CUstreamCaptureMode mode)
{
	return begin_to(handle, NULL, mode);
}

/* No caller is called back: nodes may do anything of the type that they had. */
static CUresult begin_again(CUstream handle, CUgraph graph, CUstreamCaptureMode mode)
{
	CUresult result = begin_to(handle, graph, mode);

	if (result == CUDA_SUCCESS)
		graph_begin_rewriting(graph);
	return result;
}

static CUresult end(CUstream handle, CUgraph *graph)
{
	struct CUstream_st *stream;
	CUresult result = stream_resolve(handle, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!graph || !stream->capture)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&capture_lock);
	*graph = stream->capture;
	if (!stream->capture_began_here)
		result = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
	else if (!dissolve(stream->capture_number))
		result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
	else if (!graph_end_rewriting(*graph))
		result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	pthread_mutex_unlock(&capture_lock);
	if (result == CUDA_ERROR_STREAM_CAPTURE_UNJOINED && stream->capture_is_ours)
		graph_free(*graph);
	if (result != CUDA_SUCCESS)
		*graph = NULL;
	return result;
}

/* All but the status are for those who want them. */
static CUresult info(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *number, CUgraph *graph,
		     const CUgraphNode **nodes, size_t *count)
{
	struct CUstream_st *stream;
	CUresult result = stream_resolve(handle, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!status)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&capture_lock);
	*status = stream->capture ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
	if (stream->capture && number)
		*number = stream->capture_number;
	if (stream->capture && graph)
		*graph = stream->capture;
	if (stream->capture && count)
		*count = graph_last(stream->capture, nodes);
	pthread_mutex_unlock(&capture_lock);
	return CUDA_SUCCESS;
}

API2(cuStreamBeginCapture, cuStreamBeginCapture_v2_ptsz, (CUstream stream, CUstreamCaptureMode mode),
     begin(stream, mode))
API2(cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz,
     (CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count,
      CUstreamCaptureMode mode),
     graph && (!count || dependencies) && (!edges || count) ? begin_to(stream, graph, mode) : CUDA_ERROR_INVALID_VALUE)
API2(cuStreamBeginRecaptureToGraph, cuStreamBeginRecaptureToGraph_ptsz,
     (CUstream stream, CUstreamCaptureMode mode, CUgraph graph, CUgraphRecaptureCallback callback, void *data),
     ((void)callback, (void)data, graph ? begin_again(stream, graph, mode) : CUDA_ERROR_INVALID_VALUE))
API2(cuStreamEndCapture, cuStreamEndCapture_ptsz, (CUstream stream, CUgraph *graph), end(stream, graph))
API2(cuStreamIsCapturing, cuStreamIsCapturing_ptsz, (CUstream stream, CUstreamCaptureStatus *status),
     info(stream, status, NULL, NULL, NULL, NULL))
API2(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v2_ptsz,
     (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *number, CUgraph *graph, const CUgraphNode **nodes,
      size_t *count),
     info(stream, status, number, graph, nodes, count))

/* Kept for the program only: the calls that a capture forbids elsewhere are let through in every mode. */
API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
	CUstreamCaptureMode before = thread_mode;

	if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
		return CUDA_ERROR_INVALID_VALUE;
	thread_mode = *mode;
	*mode = before;
	return CUDA_SUCCESS;
}

/* ---- the form of before CUDA 10.1 ---- */

#include "exact_names.h"

API2(cuStreamBeginCapture, cuStreamBeginCapture_ptsz, (CUstream stream), begin(stream, CU_STREAM_CAPTURE_MODE_GLOBAL))
