/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Copies whose size and direction come in a struct or a list. */
#include "internal.h"

#include <limits.h>

/* One side. An array has no address, unified memory may be on either side of the bus. */
static bool on_device(CUmemorytype type, CUdeviceptr address)
{
	return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_ARRAY ||
	       (type == CU_MEMORYTYPE_UNIFIED && is_device_address(address));
}

static bool valid_type(CUmemorytype type)
{
	return type >= CU_MEMORYTYPE_HOST && type <= CU_MEMORYTYPE_UNIFIED;
}

CUresult copy_shape(const CUDA_MEMCPY3D *c, int *kind, size_t *bytes)
{
	if (!valid_type(c->srcMemoryType) || !valid_type(c->dstMemoryType) ||
	    __builtin_mul_overflow(c->WidthInBytes, c->Height, bytes) ||
	    __builtin_mul_overflow(*bytes, c->Depth, bytes))
		return CUDA_ERROR_INVALID_VALUE;
	if ((c->srcMemoryType == CU_MEMORYTYPE_ARRAY && !is_array(c->srcArray)) ||
	    (c->dstMemoryType == CU_MEMORYTYPE_ARRAY && !is_array(c->dstArray)))
		return CUDA_ERROR_INVALID_HANDLE;
	*kind = copy_direction(on_device(c->dstMemoryType, c->dstDevice), on_device(c->srcMemoryType, c->srcDevice));
	return CUDA_SUCCESS;
}

/* What lies between the rows is touched too. */
static void touch(const CUDA_MEMCPY3D *c)
{
	char *start = c->dstMemoryType == CU_MEMORYTYPE_HOST ? c->dstHost : (char *)c->dstDevice;
	size_t pitch = c->dstPitch ? c->dstPitch : c->WidthInBytes;
	size_t slice = pitch * (c->dstHeight ? c->dstHeight : c->Height);

	start += c->dstXInBytes + c->dstY * pitch + c->dstZ * slice;
	host_touch(start, (c->Depth - 1) * slice + (c->Height - 1) * pitch + c->WidthInBytes);
}

static CUresult copy_3d(const CUDA_MEMCPY3D *c, CUstream stream, bool wait)
{
	size_t bytes;
	int kind;
	CUresult result = copy_shape(c, &kind, &bytes);

	if (result == CUDA_SUCCESS)
		result = copy_submit(kind, bytes, stream, wait);
	if (result == CUDA_SUCCESS && bytes && kind == COPY_D2H)
		touch(c);
	return result;
}

/* Of any of the structs: their fields have the same names. */
#define FLAT(c)                                                                                                        \
	.srcXInBytes = (c)->srcXInBytes, .srcY = (c)->srcY, .srcMemoryType = (c)->srcMemoryType,                       \
	.srcHost = (c)->srcHost, .srcDevice = (c)->srcDevice, .srcArray = (c)->srcArray, .srcPitch = (c)->srcPitch,    \
	.dstXInBytes = (c)->dstXInBytes, .dstY = (c)->dstY, .dstMemoryType = (c)->dstMemoryType,                       \
	.dstHost = (c)->dstHost, .dstDevice = (c)->dstDevice, .dstArray = (c)->dstArray, .dstPitch = (c)->dstPitch,    \
	.WidthInBytes = (c)->WidthInBytes, .Height = (c)->Height
#define FROM_2D(c) (&(CUDA_MEMCPY3D){FLAT(c), .Depth = 1})
#define FROM_3D(c)                                                                                                     \
	(&(CUDA_MEMCPY3D){FLAT(c), .srcZ = (c)->srcZ, .srcHeight = (c)->srcHeight, .dstZ = (c)->dstZ,                  \
			  .dstHeight = (c)->dstHeight, .Depth = (c)->Depth})
#define COPY(c, shape, stream, wait) ((c) ? copy_3d(shape, stream, wait) : CUDA_ERROR_INVALID_VALUE)

API2(cuMemcpy2D, cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D *c), COPY(c, FROM_2D(c), NULL, true))
API2(cuMemcpy2DUnaligned, cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *c), COPY(c, FROM_2D(c), NULL, true))
API2(cuMemcpy2DAsync, cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D *c, CUstream stream),
     COPY(c, FROM_2D(c), stream, false))
API2(cuMemcpy3D, cuMemcpy3D_v2_ptds, (const CUDA_MEMCPY3D *c), COPY(c, c, NULL, true))
API2(cuMemcpy3DAsync, cuMemcpy3DAsync_v2_ptsz, (const CUDA_MEMCPY3D *c, CUstream stream), COPY(c, c, stream, false))
API2(cuMemcpy3DPeer, cuMemcpy3DPeer_ptds, (const CUDA_MEMCPY3D_PEER *c), COPY(c, FROM_3D(c), NULL, true))
API2(cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz, (const CUDA_MEMCPY3D_PEER *c, CUstream stream),
     COPY(c, FROM_3D(c), stream, false))

/* ---- lists ---- */

struct batch {
	const CUdeviceptr *to, *from;
	const size_t *bytes;
	size_t count;
	const CUmemcpyAttributes *attributes;
	const size_t *indices;
	size_t attribute_count;
};

static bool valid_batch(const struct batch *b)
{
	if (!b->to || !b->from || !b->bytes || !b->count || !b->attributes || !b->indices || !b->attribute_count ||
	    b->attribute_count > b->count || b->indices[0])
		return false;
	for (size_t i = 1; i < b->attribute_count; i++)
		if (b->indices[i] <= b->indices[i - 1] || b->indices[i] >= b->count)
			return false;
	return true;
}

static CUresult copy_batch(const struct batch *b, size_t *failed, CUstream stream)
{
	CUresult result = CUDA_SUCCESS;

	if (failed)
		*failed = SIZE_MAX;
	/* The legacy NULL stream is not for batches. */
	if (!valid_batch(b) || !stream || stream == CU_STREAM_LEGACY)
		return CUDA_ERROR_INVALID_VALUE;
	result = call_begin();
	if (result != CUDA_SUCCESS)
		return result;
	for (size_t i = 0; i < b->count && result == CUDA_SUCCESS; i++) {
		int kind = copy_direction_of(b->to[i], b->from[i]);

		result = copy_submit(kind, b->bytes[i], stream, false);
		if (result != CUDA_SUCCESS && failed)
			*failed = i;
		if (result == CUDA_SUCCESS && kind == COPY_D2H)
			host_touch((void *)b->to[i], b->bytes[i]);
	}
	call_end();
	return result;
}

#define BATCH (&(struct batch){to, from, bytes, count, attributes, indices, attribute_count})

API2(cuMemcpyBatchAsync, cuMemcpyBatchAsync_ptsz,
     (CUdeviceptr * to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes, size_t *indices,
      size_t attribute_count, size_t *failed, CUstream stream),
     copy_batch(BATCH, failed, stream))
API2(cuMemcpyBatchAsync_v2, cuMemcpyBatchAsync_v2_ptsz,
     (CUdeviceptr * to, CUdeviceptr *from, size_t *bytes, size_t count, CUmemcpyAttributes *attributes, size_t *indices,
      size_t attribute_count, CUstream stream),
     copy_batch(BATCH, NULL, stream))

/* ---- the forms of before CUDA 3.2 ---- */

#include "exact_names.h"

API cuMemcpy2D(const CUDA_MEMCPY2D_v1 *c)
{
	return COPY(c, FROM_2D(c), NULL, true);
}

API cuMemcpy2DUnaligned(const CUDA_MEMCPY2D_v1 *c)
{
	return COPY(c, FROM_2D(c), NULL, true);
}

API cuMemcpy2DAsync(const CUDA_MEMCPY2D_v1 *c, CUstream stream)
{
	return COPY(c, FROM_2D(c), stream, false);
}

API cuMemcpy3D(const CUDA_MEMCPY3D_v1 *c)
{
	return COPY(c, FROM_3D(c), NULL, true);
}

API cuMemcpy3DAsync(const CUDA_MEMCPY3D_v1 *c, CUstream stream)
{
	return COPY(c, FROM_3D(c), stream, false);
}
