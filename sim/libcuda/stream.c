/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

CUresult stream_resolve(CUstream handle, struct CUstream_st **stream)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD)
		*stream = context->null;
	else if (handle->magic == MAGIC_STREAM)
		*stream = handle;
	else
		return CUDA_ERROR_INVALID_HANDLE;
	return *stream ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

CUresult stream_for_work(CUstream handle, struct CUstream_st **stream)
{
	CUresult result = stream_resolve(handle, stream);

	if (result == CUDA_SUCCESS && (*stream)->capture)
		return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
	return result;
}

static CUresult create(CUstream *stream, unsigned flags, int priority)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!stream || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
		return CUDA_ERROR_INVALID_VALUE;
	return ring_stream_new(context, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority, stream);
}

API cuStreamCreate(CUstream *stream, unsigned flags)
{
	return create(stream, flags, 0);
}

API cuStreamCreateWithPriority(CUstream *stream, unsigned flags, int priority)
{
	return create(stream, flags, priority);
}

static CUresult flags_of(CUstream handle, unsigned *flags)
{
	struct CUstream_st *stream;
	CUresult result = flags ? stream_resolve(handle, &stream) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*flags = stream->flags;
	return result;
}

static CUresult priority_of(CUstream handle, int *priority)
{
	struct CUstream_st *stream;
	CUresult result = priority ? stream_resolve(handle, &stream) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*priority = stream->priority;
	return result;
}

static CUresult context_of(CUstream handle, CUcontext *context)
{
	struct CUstream_st *stream;
	CUresult result = context ? stream_resolve(handle, &stream) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*context = stream->context;
	return result;
}

API2(cuStreamGetCtx, cuStreamGetCtx_ptsz, (CUstream stream, CUcontext *context), context_of(stream, context))
API2(cuStreamGetFlags, cuStreamGetFlags_ptsz, (CUstream stream, unsigned *flags), flags_of(stream, flags))
API2(cuStreamGetPriority, cuStreamGetPriority_ptsz, (CUstream stream, int *priority), priority_of(stream, priority))

static CUresult destroy(CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!handle || handle == CU_STREAM_LEGACY || handle == CU_STREAM_PER_THREAD || handle->magic != MAGIC_STREAM ||
	    handle == handle->context->null)
		return CUDA_ERROR_INVALID_HANDLE;
	stream = handle;
	capture_leave(stream);
	ring_stream_end(stream);
	return CUDA_SUCCESS;
}

static CUresult synchronize(CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_for_work(handle, &stream);
	uint32_t number;

	if (result == CUDA_SUCCESS)
		result = call_pass();
	if (result != CUDA_SUCCESS)
		return result;
	number = stream->number;
	result = point_wait(ring_last(stream));
	return result == CUDA_SUCCESS ? host_wait(number) : result;
}

static CUresult query(CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_for_work(handle, &stream);

	if (result == CUDA_SUCCESS)
		result = call_pass();
	if (result == CUDA_SUCCESS)
		result = point_query(ring_last(stream));
	return result == CUDA_SUCCESS && host_pending(stream->number) ? CUDA_ERROR_NOT_READY : result;
}

API2(cuStreamSynchronize, cuStreamSynchronize_ptsz, (CUstream stream), synchronize(stream))
API2(cuStreamQuery, cuStreamQuery_ptsz, (CUstream stream), query(stream))
API cuStreamDestroy(CUstream handle)
{
	return destroy(handle);
}

/* ---- the form of before CUDA 4 ---- */

#include "exact_names.h"

API cuStreamDestroy(CUstream handle)
{
	return destroy(handle);
}
