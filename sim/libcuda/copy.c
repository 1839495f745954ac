/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Copies take time and are counted; no data is moved, because device memory has no content. A copy to the host makes the
 * destination's pages resident.
 */
#include "internal.h"

CUresult copy_submit(int kind, size_t bytes, CUstream handle, bool wait)
{
	struct CUstream_st *stream;
	struct point at;
	CUresult result = stream_resolve(handle, &stream);

	if (result != CUDA_SUCCESS || !bytes || kind == NO_COPY)
		return result;
	if (stream->capture)
		return wait ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : capture_copy(stream, kind, bytes);
	result = ring_operation(stream, CMD_COPY, (uint64_t[4]){(uint64_t)kind, bytes}, &at);
	return result == CUDA_SUCCESS && wait ? point_wait(at) : result;
}

CUresult copy_between(uint32_t to, uint32_t from, size_t bytes, CUstream handle, bool wait)
{
	struct CUstream_st *stream;
	struct point at;
	CUresult result = stream_resolve(handle, &stream);

	if (result != CUDA_SUCCESS || !bytes)
		return result;
	if (stream->capture || to == from || to == NO_DEVICE || from == NO_DEVICE)
		return copy_submit(COPY_D2D, bytes, handle, wait);
	result = ring_operation(stream, CMD_COPY, (uint64_t[4]){COPY_PEER, bytes, to, from}, &at);
	return result == CUDA_SUCCESS && wait ? point_wait(at) : result;
}

static CUresult between_contexts(CUcontext to, CUcontext from, size_t bytes, CUstream stream, bool wait)
{
	if (!to || to->magic != MAGIC_CONTEXT || !from || from->magic != MAGIC_CONTEXT)
		return CUDA_ERROR_INVALID_CONTEXT;
	return copy_between(to->device, from->device, bytes, stream, wait);
}

static CUresult between_addresses(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, bool wait)
{
	return copy_between(device_at(to), device_at(from), bytes, stream, wait);
}

int copy_direction(bool to_device, bool from_device)
{
	if (to_device)
		return from_device ? COPY_D2D : COPY_H2D;
	return from_device ? COPY_D2H : NO_COPY;
}

int copy_direction_of(CUdeviceptr to, CUdeviceptr from)
{
	return copy_direction(is_device_address(to), is_device_address(from));
}

static CUresult to_host(void *to, size_t bytes, CUstream stream, bool wait)
{
	CUresult result = copy_submit(COPY_D2H, bytes, stream, wait);

	if (result == CUDA_SUCCESS)
		host_touch(to, bytes);
	return result;
}

static CUresult unified(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream, bool wait)
{
	int kind = copy_direction_of(to, from);

	if (kind == COPY_D2H)
		return to_host((void *)to, bytes, stream, wait);
	if (kind == COPY_D2D)
		return between_addresses(to, from, bytes, stream, wait);
	return copy_submit(kind, bytes, stream, wait);
}

static CUresult with_array(int kind, CUarray array, size_t bytes, CUstream stream, bool wait)
{
	return is_array(array) ? copy_submit(kind, bytes, stream, wait) : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult array_to_host(void *to, CUarray from, size_t bytes, CUstream stream, bool wait)
{
	return is_array(from) ? to_host(to, bytes, stream, wait) : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult array_to_array(CUarray to, CUarray from, size_t bytes)
{
	return is_array(to) ? with_array(COPY_D2D, from, bytes, NULL, true) : CUDA_ERROR_INVALID_HANDLE;
}

static CUresult prefetch(CUdeviceptr pointer, size_t bytes, bool to_device, CUstream stream)
{
	(void)pointer; /* any memory may move: also the host's own, as with heterogeneous memory management */
	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	return copy_submit(to_device ? COPY_H2D : COPY_D2H, bytes, stream, false);
}

static CUresult prefetch_to(CUdeviceptr pointer, size_t bytes, CUmemLocation to, unsigned flags, CUstream stream)
{
	if (flags || to.type <= CU_MEM_LOCATION_TYPE_INVALID || to.type > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT)
		return CUDA_ERROR_INVALID_VALUE;
	return prefetch(pointer, bytes, to.type == CU_MEM_LOCATION_TYPE_DEVICE, stream);
}

#define SYNC(kind) copy_submit(kind, bytes, NULL, true)
#define ASYNC(kind) copy_submit(kind, bytes, stream, false)
#define UNUSED2 (void)to, (void)from

API2(cuMemcpy, cuMemcpy_ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes), unified(to, from, bytes, NULL, true))
API2(cuMemcpyHtoD, cuMemcpyHtoD_v2_ptds, (CUdeviceptr to, const void *from, size_t bytes), (UNUSED2, SYNC(COPY_H2D)))
API2(cuMemcpyDtoH, cuMemcpyDtoH_v2_ptds, (void *to, CUdeviceptr from, size_t bytes),
     ((void)from, to_host(to, bytes, NULL, true)))
API2(cuMemcpyDtoD, cuMemcpyDtoD_v2_ptds, (CUdeviceptr to, CUdeviceptr from, size_t bytes),
     between_addresses(to, from, bytes, NULL, true))
API2(cuMemcpyPeer, cuMemcpyPeer_ptds,
     (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes),
     (UNUSED2, between_contexts(to_context, from_context, bytes, NULL, true)))

API2(cuMemcpyWithAttributesAsync, cuMemcpyWithAttributesAsync_ptsz,
     (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUmemcpyAttributes *attributes, CUstream stream),
     attributes ? unified(to, from, bytes, stream, false) : CUDA_ERROR_INVALID_VALUE)
API2(cuMemcpyAsync, cuMemcpyAsync_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
     unified(to, from, bytes, stream, false))
API2(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2_ptsz, (CUdeviceptr to, const void *from, size_t bytes, CUstream stream),
     (UNUSED2, ASYNC(COPY_H2D)))
API2(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2_ptsz, (void *to, CUdeviceptr from, size_t bytes, CUstream stream),
     ((void)from, to_host(to, bytes, stream, false)))
API2(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream),
     between_addresses(to, from, bytes, stream, false))
API2(cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz,
     (CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t bytes, CUstream stream),
     (UNUSED2, between_contexts(to_context, from_context, bytes, stream, false)))
API2(cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz, (CUdeviceptr pointer, size_t bytes, CUdevice to, CUstream stream),
     prefetch(pointer, bytes, to >= 0, stream))
API2(cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz,
     (CUdeviceptr pointer, size_t bytes, CUmemLocation to, unsigned flags, CUstream stream),
     prefetch_to(pointer, bytes, to, flags, stream))

API2(cuMemcpyAtoH, cuMemcpyAtoH_v2_ptds, (void *to, CUarray from, size_t offset, size_t bytes),
     ((void)offset, array_to_host(to, from, bytes, NULL, true)))
API2(cuMemcpyHtoA, cuMemcpyHtoA_v2_ptds, (CUarray to, size_t offset, const void *from, size_t bytes),
     ((void)from, (void)offset, with_array(COPY_H2D, to, bytes, NULL, true)))
API2(cuMemcpyAtoD, cuMemcpyAtoD_v2_ptds, (CUdeviceptr to, CUarray from, size_t offset, size_t bytes),
     ((void)to, (void)offset, with_array(COPY_D2D, from, bytes, NULL, true)))
API2(cuMemcpyDtoA, cuMemcpyDtoA_v2_ptds, (CUarray to, size_t offset, CUdeviceptr from, size_t bytes),
     ((void)from, (void)offset, with_array(COPY_D2D, to, bytes, NULL, true)))
API2(cuMemcpyAtoA, cuMemcpyAtoA_v2_ptds, (CUarray to, size_t at, CUarray from, size_t offset, size_t bytes),
     ((void)at, (void)offset, array_to_array(to, from, bytes)))
API2(cuMemcpyAtoHAsync, cuMemcpyAtoHAsync_v2_ptsz,
     (void *to, CUarray from, size_t offset, size_t bytes, CUstream stream),
     ((void)offset, array_to_host(to, from, bytes, stream, false)))
API2(cuMemcpyHtoAAsync, cuMemcpyHtoAAsync_v2_ptsz,
     (CUarray to, size_t offset, const void *from, size_t bytes, CUstream stream),
     ((void)from, (void)offset, with_array(COPY_H2D, to, bytes, stream, false)))

/* ---- the forms of before CUDA 3.2 ---- */

#include "exact_names.h"

API cuMemcpyHtoD(CUdeviceptr_v1 to, const void *from, unsigned bytes)
{
	return UNUSED2, SYNC(COPY_H2D);
}

API cuMemcpyDtoH(void *to, CUdeviceptr_v1 from, unsigned bytes)
{
	return (void)from, to_host(to, bytes, NULL, true);
}

API cuMemcpyDtoD(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned bytes)
{
	return UNUSED2, SYNC(COPY_D2D);
}

API cuMemcpyHtoDAsync(CUdeviceptr_v1 to, const void *from, unsigned bytes, CUstream stream)
{
	return UNUSED2, ASYNC(COPY_H2D);
}

API cuMemcpyDtoHAsync(void *to, CUdeviceptr_v1 from, unsigned bytes, CUstream stream)
{
	return (void)from, to_host(to, bytes, stream, false);
}

API cuMemcpyDtoDAsync(CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned bytes, CUstream stream)
{
	return UNUSED2, ASYNC(COPY_D2D);
}

API cuMemcpyAtoH(void *to, CUarray from, unsigned offset, unsigned bytes)
{
	return (void)offset, array_to_host(to, from, bytes, NULL, true);
}

API cuMemcpyHtoA(CUarray to, unsigned offset, const void *from, unsigned bytes)
{
	return (void)from, (void)offset, with_array(COPY_H2D, to, bytes, NULL, true);
}

API cuMemcpyAtoD(CUdeviceptr_v1 to, CUarray from, unsigned offset, unsigned bytes)
{
	return (void)to, (void)offset, with_array(COPY_D2D, from, bytes, NULL, true);
}

API cuMemcpyDtoA(CUarray to, unsigned offset, CUdeviceptr_v1 from, unsigned bytes)
{
	return (void)from, (void)offset, with_array(COPY_D2D, to, bytes, NULL, true);
}

API cuMemcpyAtoA(CUarray to, unsigned at, CUarray from, unsigned offset, unsigned bytes)
{
	return (void)at, (void)offset, array_to_array(to, from, bytes);
}

API cuMemcpyAtoHAsync(void *to, CUarray from, unsigned offset, unsigned bytes, CUstream stream)
{
	return (void)offset, array_to_host(to, from, bytes, stream, false);
}

API cuMemcpyHtoAAsync(CUarray to, unsigned offset, const void *from, unsigned bytes, CUstream stream)
{
	return (void)from, (void)offset, with_array(COPY_H2D, to, bytes, stream, false);
}
