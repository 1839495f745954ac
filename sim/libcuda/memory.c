/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <stdlib.h>

#define FIRST_DEVICE_ADDRESS 0x700000000000ull
#define END_DEVICE_ADDRESS 0x780000000000ull
#define FIRST_RESERVATION 0x740000000000ull
#define GRANULARITY (2ull << 20)
#define PITCH 512
#define PAGE 4096

struct allocation {
	uint64_t address;
	uint32_t device;
	struct CUctx_st *context; /* NULL: a physical handle, which belongs to no context */
};

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;
static size_t allocation_count, allocation_room;
static _Atomic uint64_t next_reservation = FIRST_RESERVATION;

bool is_device_address(uint64_t address)
{
	return address >= FIRST_DEVICE_ADDRESS && address < END_DEVICE_ADDRESS;
}

/* ---- what we hold ---- */

static bool remember(struct allocation allocation)
{
	bool kept = true;

	pthread_mutex_lock(&memory_lock);
	if (allocation_count == allocation_room) {
		size_t room = allocation_room ? allocation_room * 2 : 64;
		struct allocation *larger = realloc(allocations, room * sizeof(*larger));

		kept = larger != NULL;
		if (kept) {
			allocations = larger;
			allocation_room = room;
		}
	}
	if (kept)
		allocations[allocation_count++] = allocation;
	pthread_mutex_unlock(&memory_lock);
	return kept;
}

static bool forget(uint64_t address, bool physical, struct allocation *found)
{
	bool known = false;

	pthread_mutex_lock(&memory_lock);
	for (size_t i = allocation_count; i-- > 0 && !known;)
		if (allocations[i].address == address && (allocations[i].context == NULL) == physical) {
			*found = allocations[i];
			allocations[i] = allocations[--allocation_count];
			known = true;
		}
	pthread_mutex_unlock(&memory_lock);
	return known;
}

static CUresult take(uint32_t device, struct CUctx_st *context, size_t bytes, uint64_t *address)
{
	uint64_t values[2];
	CUresult result = ring_request(CMD_ALLOC, device, bytes, values);

	if (result != CUDA_SUCCESS)
		return result;
	if (!remember((struct allocation){values[0], device, context})) {
		ring_request(CMD_FREE, device, values[0], NULL);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*address = values[0];
	return CUDA_SUCCESS;
}

static CUresult give_back(uint64_t address, bool physical)
{
	struct allocation found;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!forget(address, physical, &found))
		return CUDA_ERROR_INVALID_VALUE;
	return ring_request(CMD_FREE, found.device, found.address, NULL);
}

void memory_forget(struct CUctx_st *context)
{
	for (;;) {
		struct allocation found = {0};

		pthread_mutex_lock(&memory_lock);
		for (size_t i = allocation_count; i-- > 0 && !found.address;)
			if (allocations[i].context == context) {
				found = allocations[i];
				allocations[i] = allocations[--allocation_count];
			}
		pthread_mutex_unlock(&memory_lock);
		if (!found.address)
			return;
		ring_request(CMD_FREE, found.device, found.address, NULL);
	}
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes)
{
	struct CUctx_st *context;
	uint64_t address;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pointer || !bytes)
		return CUDA_ERROR_INVALID_VALUE;
	result = take(context->device, context, bytes, &address);
	if (result == CUDA_SUCCESS)
		*pointer = address;
	return result;
}

static CUresult allocate_on(CUdeviceptr *pointer, size_t bytes, CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_for_work(handle, &stream);

	return result == CUDA_SUCCESS ? allocate(pointer, bytes) : result;
}

static CUresult release_on(CUdeviceptr pointer, CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_for_work(handle, &stream);

	return result == CUDA_SUCCESS ? give_back(pointer, false) : result;
}

/* ---- exports: device memory ---- */

API cuMemGetInfo(size_t *free_bytes, size_t *total)
{
	struct CUctx_st *context;
	uint64_t values[2];
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	result = ring_request(CMD_MEMORY_INFO, context->device, 0, values);
	if (result != CUDA_SUCCESS)
		return result;
	if (free_bytes)
		*free_bytes = values[0];
	if (total)
		*total = values[1];
	return CUDA_SUCCESS;
}

API cuMemAlloc(CUdeviceptr *pointer, size_t bytes)
{
	return allocate(pointer, bytes);
}

API cuMemAllocPitch(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element_bytes)
{
	size_t row, bytes;
	CUresult result;

	if (!pitch || !width || !height || (element_bytes != 4 && element_bytes != 8 && element_bytes != 16) ||
	    width > SIZE_MAX - PITCH)
		return CUDA_ERROR_INVALID_VALUE;
	row = (width + PITCH - 1) / PITCH * PITCH;
	if (__builtin_mul_overflow(row, height, &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	result = allocate(pointer, bytes);
	if (result == CUDA_SUCCESS)
		*pitch = row;
	return result;
}

API cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags)
{
	return flags ? allocate(pointer, bytes) : CUDA_ERROR_INVALID_VALUE;
}

API2(cuMemAllocAsync, cuMemAllocAsync_ptsz, (CUdeviceptr * pointer, size_t bytes, CUstream stream),
     allocate_on(pointer, bytes, stream))
API2(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz,
     (CUdeviceptr * pointer, size_t bytes, CUmemoryPool pool, CUstream stream),
     ((void)pool, allocate_on(pointer, bytes, stream)))

API cuMemFree(CUdeviceptr pointer)
{
	return pointer ? give_back(pointer, false) : ready();
}

API2(cuMemFreeAsync, cuMemFreeAsync_ptsz, (CUdeviceptr pointer, CUstream stream), release_on(pointer, stream))

/* ---- exports: host memory ---- */

static CUresult allocate_host(void **pointer, size_t bytes)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pointer || !bytes || bytes > SIZE_MAX - PAGE)
		return CUDA_ERROR_INVALID_VALUE;
	*pointer = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
	return *pointer ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API cuMemAllocHost(void **pointer, size_t bytes)
{
	return allocate_host(pointer, bytes);
}

API cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
	(void)flags;
	return allocate_host(pointer, bytes);
}

API cuMemFreeHost(void *pointer)
{
	CUresult result = ready();

	if (result == CUDA_SUCCESS)
		free(pointer);
	return result;
}

/* ---- exports: physical memory and address ranges ---- */

API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
		unsigned long long flags)
{
	uint64_t address;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!handle || !prop || flags || !bytes || bytes % GRANULARITY || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
	    prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	result = ready_ordinal(prop->location.id);
	if (result == CUDA_SUCCESS)
		result = take(connection.visible[prop->location.id], NULL, bytes, &address);
	if (result == CUDA_SUCCESS)
		*handle = address;
	return result;
}

API cuMemRelease(CUmemGenericAllocationHandle handle)
{
	return give_back(handle, true);
}

API cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr address,
			unsigned long long flags)
{
	uint64_t step = alignment > GRANULARITY ? alignment : GRANULARITY, start, at;
	CUresult result = ready();

	(void)address; /* a wish only */
	if (result != CUDA_SUCCESS)
		return result;
	if (!pointer || flags || !bytes || bytes % GRANULARITY || (alignment & (alignment - 1)) ||
	    bytes > END_DEVICE_ADDRESS - FIRST_RESERVATION || step > END_DEVICE_ADDRESS - FIRST_RESERVATION)
		return CUDA_ERROR_INVALID_VALUE;
	start = atomic_load(&next_reservation);
	do {
		at = (start + step - 1) / step * step;
		if (at + bytes > END_DEVICE_ADDRESS)
			return CUDA_ERROR_OUT_OF_MEMORY;
	} while (!atomic_compare_exchange_weak(&next_reservation, &start, at + bytes));
	*pointer = at;
	return CUDA_SUCCESS;
}

static CUresult check_range(CUdeviceptr pointer, size_t bytes)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return bytes && pointer >= FIRST_RESERVATION && pointer + bytes <= atomic_load(&next_reservation)
		       ? CUDA_SUCCESS
		       : CUDA_ERROR_INVALID_VALUE;
}

API cuMemAddressFree(CUdeviceptr pointer, size_t bytes)
{
	return check_range(pointer, bytes);
}

API cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
	     unsigned long long flags)
{
	return offset || flags || !handle ? CUDA_ERROR_INVALID_VALUE : check_range(pointer, bytes);
}

API cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
	return !access || !count ? CUDA_ERROR_INVALID_VALUE : check_range(pointer, bytes);
}

API cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
	return check_range(pointer, bytes);
}
