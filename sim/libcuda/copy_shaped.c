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

/* A context says whose memory a side is, where it is memory of a device. */
static CUresult copy_peer(const CUDA_MEMCPY3D_PEER *p, const CUDA_MEMCPY3D *c, CUstream stream, bool wait)
{
	CUcontext to = p->dstContext, from = p->srcContext;
	size_t bytes;
	int kind;
	CUresult result = copy_shape(c, &kind, &bytes);

	if (result != CUDA_SUCCESS || kind != COPY_D2D || !to || to->magic != MAGIC_CONTEXT || !from ||
	    from->magic != MAGIC_CONTEXT)
		return result == CUDA_SUCCESS ? copy_3d(c, stream, wait) : result;
	return copy_between(to->device, from->device, bytes, stream, wait);
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
API2(cuMemcpy3DPeer, cuMemcpy3DPeer_ptds, (const CUDA_MEMCPY3D_PEER *c),
     c ? copy_peer(c, FROM_3D(c), NULL, true) : CUDA_ERROR_INVALID_VALUE)
API2(cuMemcpy3DPeerAsync, cuMemcpy3DPeerAsync_ptsz, (const CUDA_MEMCPY3D_PEER *c, CUstream stream),
     c ? copy_peer(c, FROM_3D(c), stream, false) : CUDA_ERROR_INVALID_VALUE)

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

		result = kind == COPY_D2D
				 ? copy_between(device_at(b->to[i]), device_at(b->from[i]), b->bytes[i], stream, false)
				 : copy_submit(kind, b->bytes[i], stream, false);
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

/* ---- lists of shapes ---- */

/* What the extent counts: elements of the array that takes part, else bytes. */
static size_t element_bytes(const CUDA_MEMCPY3D_BATCH_OP *c)
{
	if (c->src.type == CU_MEMCPY_OPERAND_TYPE_ARRAY)
		return array_element_bytes(c->src.op.array.array);
	return c->dst.type == CU_MEMCPY_OPERAND_TYPE_ARRAY ? array_element_bytes(c->dst.op.array.array) : 1;
}

static bool operand_on_device(const CUmemcpy3DOperand *o)
{
	return o->type == CU_MEMCPY_OPERAND_TYPE_ARRAY || is_device_address(o->op.ptr.ptr);
}

static bool valid_operand(const CUmemcpy3DOperand *o)
{
	return o->type == CU_MEMCPY_OPERAND_TYPE_ARRAY ? is_array(o->op.array.array)
						       : o->type == CU_MEMCPY_OPERAND_TYPE_POINTER && o->op.ptr.ptr;
}

static CUresult copy_operation(const CUDA_MEMCPY3D_BATCH_OP *c, CUstream stream)
{
	int kind = copy_direction(operand_on_device(&c->dst), operand_on_device(&c->src));
	size_t bytes;

	if (!valid_operand(&c->src) || !valid_operand(&c->dst) || !c->extent.width || !c->extent.height ||
	    !c->extent.depth || __builtin_mul_overflow(c->extent.width, c->extent.height, &bytes) ||
	    __builtin_mul_overflow(bytes, c->extent.depth, &bytes) ||
	    __builtin_mul_overflow(bytes, element_bytes(c), &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	if (kind == COPY_D2D && c->src.type == CU_MEMCPY_OPERAND_TYPE_POINTER &&
	    c->dst.type == CU_MEMCPY_OPERAND_TYPE_POINTER)
		return copy_between(device_at(c->dst.op.ptr.ptr), device_at(c->src.op.ptr.ptr), bytes, stream, false);
	return copy_submit(kind, bytes, stream, false);
}

static CUresult copy_operations(const CUDA_MEMCPY3D_BATCH_OP *copies, size_t count, size_t *failed,
				unsigned long long flags, CUstream stream)
{
	CUresult result = copies && count && !flags && stream && stream != CU_STREAM_LEGACY ? call_begin()
											    : CUDA_ERROR_INVALID_VALUE;

	if (failed)
		*failed = SIZE_MAX;
	if (result != CUDA_SUCCESS)
		return result;
	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
		result = copy_operation(&copies[i], stream);
		if (result != CUDA_SUCCESS && failed)
			*failed = i;
	}
	call_end();
	return result;
}

API2(cuMemcpy3DBatchAsync, cuMemcpy3DBatchAsync_ptsz,
     (size_t count, CUDA_MEMCPY3D_BATCH_OP *copies, size_t *failed, unsigned long long flags, CUstream stream),
     copy_operations(copies, count, failed, flags, stream))
API2(cuMemcpy3DBatchAsync_v2, cuMemcpy3DBatchAsync_v2_ptsz,
     (size_t count, CUDA_MEMCPY3D_BATCH_OP *copies, unsigned long long flags, CUstream stream),
     copy_operations(copies, count, NULL, flags, stream))
API2(cuMemcpy3DWithAttributesAsync, cuMemcpy3DWithAttributesAsync_ptsz,
     (CUDA_MEMCPY3D_BATCH_OP * copy, unsigned long long flags, CUstream stream),
     copy_operations(copy, 1, NULL, flags, stream))

/* ---- lists of prefetches ---- */

struct prefetches {
	const size_t *bytes;
	size_t count;
	const CUmemLocation *locations;
	const size_t *indices; /* the first that each location is for */
	size_t location_count;
};

static CUresult prefetch_list(const struct prefetches *p, unsigned long long flags, CUstream stream)
{
	CUresult result = CUDA_SUCCESS;
	size_t next = 0;

	if (!p->bytes || !p->count || !p->locations || !p->indices || !p->location_count || p->indices[0] || flags)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < p->count && result == CUDA_SUCCESS; i++) {
		if (next < p->location_count && p->indices[next] == i)
			next++;
		result = copy_submit(p->locations[next - 1].type == CU_MEM_LOCATION_TYPE_DEVICE ? COPY_H2D : COPY_D2H,
				     p->bytes[i], stream, false);
	}
	return result;
}

API2(cuMemPrefetchBatchAsync, cuMemPrefetchBatchAsync_ptsz,
     (CUdeviceptr * pointers, size_t *bytes, size_t count, CUmemLocation *locations, size_t *indices,
      size_t location_count, unsigned long long flags, CUstream stream),
     pointers ? prefetch_list(&(struct prefetches){bytes, count, locations, indices, location_count}, flags, stream)
	      : CUDA_ERROR_INVALID_VALUE)

/* Discarding frees nothing: what follows is a prefetch like others. */
API2(cuMemDiscardAndPrefetchBatchAsync, cuMemDiscardAndPrefetchBatchAsync_ptsz,
     (CUdeviceptr * pointers, size_t *bytes, size_t count, CUmemLocation *locations, size_t *indices,
      size_t location_count, unsigned long long flags, CUstream stream),
     pointers ? prefetch_list(&(struct prefetches){bytes, count, locations, indices, location_count}, flags, stream)
	      : CUDA_ERROR_INVALID_VALUE)

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
