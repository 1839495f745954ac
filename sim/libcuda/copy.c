/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Copies take time and are counted; no data is moved, because device memory has no content. */
#include "internal.h"

enum { NO_COPY = -1 };

static CUresult copy(int kind, size_t bytes, CUstream handle, bool wait)
{
	struct CUstream_st *stream;
	struct point at;
	CUresult result = stream_for_work(handle, &stream);

	if (result != CUDA_SUCCESS || !bytes || kind == NO_COPY)
		return result;
	result = ring_operation(stream, CMD_COPY, (uint64_t[4]){(uint64_t)kind, bytes}, &at);
	return result == CUDA_SUCCESS && wait ? point_wait(at) : result;
}

static int direction(bool to_device, bool from_device)
{
	if (to_device)
		return from_device ? COPY_D2D : COPY_H2D;
	return from_device ? COPY_D2H : NO_COPY;
}

static int direction_of(CUdeviceptr to, CUdeviceptr from)
{
	return direction(is_device_address(to), is_device_address(from));
}

static CUresult set(CUdeviceptr pointer, size_t count, size_t width, CUstream stream)
{
	size_t bytes;

	if (!is_device_address(pointer) || pointer % width || __builtin_mul_overflow(count, width, &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	return copy(COPY_SET, bytes, stream, false);
}

static bool on_device(CUmemorytype type, CUdeviceptr address)
{
	return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_ARRAY ||
	       (type == CU_MEMORYTYPE_UNIFIED && is_device_address(address));
}

static CUresult copy_2d(const CUDA_MEMCPY2D *c, CUstream stream, bool wait)
{
	size_t bytes;

	if (!c || __builtin_mul_overflow(c->WidthInBytes, c->Height, &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	return copy(direction(on_device(c->dstMemoryType, c->dstDevice), on_device(c->srcMemoryType, c->srcDevice)),
		    bytes, stream, wait);
}

#define SYNC(kind) copy(kind, bytes, NULL, true)
#define ASYNC(kind) copy(kind, bytes, stream, false)
#define UNUSED2 (void)to, (void)from

API2(cuMemcpy, cuMemcpy_ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), SYNC(direction_of(to, from)))
API2(cuMemcpyHtoD, cuMemcpyHtoD_v2_ptds, (CUdeviceptr to, const void *from, size_t bytes), (UNUSED2, SYNC(COPY_H2D)))
API2(cuMemcpyDtoH, cuMemcpyDtoH_v2_ptds, (void *to, CUdeviceptr from, size_t bytes), (UNUSED2, SYNC(COPY_D2H)))
API2(cuMemcpyDtoD, cuMemcpyDtoD_v2_ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), (UNUSED2, SYNC(COPY_D2D)))
API2(cuMemcpyPeer, cuMemcpyPeer_ptds,
     (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes),
     (UNUSED2, (void)to_context, (void)from_context, SYNC(COPY_D2D)))
API2(cuMemcpy2D, cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D *c), copy_2d(c, NULL, true))
API2(cuMemcpy2DUnaligned, cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *c), copy_2d(c, NULL, true))

API2(cuMemcpyAsync, cuMemcpyAsync_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
     ASYNC(direction_of(to, from)))
API2(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2_ptsz, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
     (UNUSED2, ASYNC(COPY_H2D)))
API2(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2_ptsz, (void *to, CUdeviceptr from, size_t bytes, CUstream stream),
     (UNUSED2, ASYNC(COPY_D2H)))
API2(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
     (UNUSED2, ASYNC(COPY_D2D)))
API2(cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz,
     (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream),
     (UNUSED2, (void)to_context, (void)from_context, ASYNC(COPY_D2D)))
API2(cuMemcpy2DAsync, cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D *c, CUstream stream), copy_2d(c, stream, false))
API2(cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz, (CUdeviceptr pointer, size_t bytes, CUdevice to, CUstream stream),
     ((void)pointer, ASYNC(to < 0 ? COPY_D2H : COPY_H2D)))

API2(cuMemsetD8, cuMemsetD8_v2_ptds, (CUdeviceptr pointer, unsigned char value, size_t count),
     ((void)value, set(pointer, count, 1, NULL)))
API2(cuMemsetD16, cuMemsetD16_v2_ptds, (CUdeviceptr pointer, unsigned short value, size_t count),
     ((void)value, set(pointer, count, 2, NULL)))
API2(cuMemsetD32, cuMemsetD32_v2_ptds, (CUdeviceptr pointer, unsigned value, size_t count),
     ((void)value, set(pointer, count, 4, NULL)))
API2(cuMemsetD8Async, cuMemsetD8Async_ptsz, (CUdeviceptr pointer, unsigned char value, size_t count, CUstream stream),
     ((void)value, set(pointer, count, 1, stream)))
API2(cuMemsetD16Async, cuMemsetD16Async_ptsz,
     (CUdeviceptr pointer, unsigned short value, size_t count, CUstream stream),
     ((void)value, set(pointer, count, 2, stream)))
API2(cuMemsetD32Async, cuMemsetD32Async_ptsz, (CUdeviceptr pointer, unsigned value, size_t count, CUstream stream),
     ((void)value, set(pointer, count, 4, stream)))
