/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Physical memory, which belongs to no context, and the address ranges it is mapped at. */
#include "internal.h"

#define GRANULARITY (2ull << 20)

static _Atomic uint64_t next_reservation = FIRST_RESERVATION;

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
		result = memory_take(connection.visible[prop->location.id], NULL, bytes, MEMORY_PHYSICAL, &address);
	if (result == CUDA_SUCCESS)
		*handle = address;
	return result;
}

API cuMemRelease(CUmemGenericAllocationHandle handle)
{
	return memory_give_back(handle, MEMORY_PHYSICAL);
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
