/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Physical memory, which belongs to no context, and the address ranges it is mapped at. */
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#define GRANULARITY (2ull << 20)

struct mapping {
	uint64_t at, bytes, handle;
};

static _Atomic uint64_t next_reservation = FIRST_RESERVATION;
static pthread_mutex_t mapping_lock = PTHREAD_MUTEX_INITIALIZER;
static struct mapping *mappings;
static size_t mapping_count, mapping_room;

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
	return memory_release(handle);
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
	    bytes > FIRST_GRAPH_ADDRESS - FIRST_RESERVATION || step > FIRST_GRAPH_ADDRESS - FIRST_RESERVATION)
		return CUDA_ERROR_INVALID_VALUE;
	start = atomic_load(&next_reservation);
	do {
		at = (start + step - 1) / step * step;
		if (at + bytes > FIRST_GRAPH_ADDRESS)
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

static bool overlaps(const struct mapping *m, uint64_t at, uint64_t bytes)
{
	return m->at < at + bytes && at < m->at + m->bytes;
}

/* With mapping_lock. */
static CUresult add_mapping(struct mapping mapping)
{
	for (size_t i = 0; i < mapping_count; i++)
		if (overlaps(&mappings[i], mapping.at, mapping.bytes))
			return CUDA_ERROR_INVALID_VALUE;
	if (mapping_count == mapping_room) {
		size_t room = mapping_room ? mapping_room * 2 : 64;
		struct mapping *larger = realloc(mappings, room * sizeof(*larger));

		if (!larger)
			return CUDA_ERROR_OUT_OF_MEMORY;
		mappings = larger;
		mapping_room = room;
	}
	mappings[mapping_count++] = mapping;
	return CUDA_SUCCESS;
}

API cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
	     unsigned long long flags)
{
	struct shared_memory memory;
	CUresult result = offset || flags ? CUDA_ERROR_INVALID_VALUE : check_range(pointer, bytes);

	if (result == CUDA_SUCCESS)
		result = memory_retain(handle, &memory);
	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&mapping_lock);
	result =
		bytes > memory.bytes ? CUDA_ERROR_INVALID_VALUE : add_mapping((struct mapping){pointer, bytes, handle});
	pthread_mutex_unlock(&mapping_lock);
	if (result != CUDA_SUCCESS)
		memory_release(handle);
	return result;
}

API cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
	return !access || !count ? CUDA_ERROR_INVALID_VALUE : check_range(pointer, bytes);
}

/* With mapping_lock: takes one out that begins there, and says how long it is; 0: none does. */
static uint64_t take_mapping(uint64_t at, uint64_t *handle)
{
	for (size_t i = 0; i < mapping_count; i++)
		if (mappings[i].at == at) {
			uint64_t bytes = mappings[i].bytes;

			*handle = mappings[i].handle;
			mappings[i] = mappings[--mapping_count];
			return bytes;
		}
	return 0;
}

/* With mapping_lock: whether the range is whole mappings, one behind the other. */
static bool is_whole(uint64_t at, uint64_t end)
{
	bool found = true;

	while (found && at < end) {
		found = false;
		for (size_t i = 0; i < mapping_count && !found; i++)
			if (mappings[i].at == at) {
				at += mappings[i].bytes;
				found = true;
			}
	}
	return at == end;
}

API cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
	CUresult result = check_range(pointer, bytes);
	uint64_t end = pointer + bytes, handle = 0;

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&mapping_lock);
	if (!is_whole(pointer, end))
		result = CUDA_ERROR_INVALID_VALUE;
	while (result == CUDA_SUCCESS && pointer < end) {
		pointer += take_mapping(pointer, &handle);
		result = memory_release(handle);
	}
	pthread_mutex_unlock(&mapping_lock);
	return result;
}

/* ---- handles of memory that is there already ---- */

API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
	uint64_t at = (uint64_t)(uintptr_t)address, found = 0;
	struct shared_memory memory;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&mapping_lock);
	for (size_t i = 0; i < mapping_count && !found; i++)
		if (overlaps(&mappings[i], at, 1))
			found = mappings[i].handle;
	result = found && handle ? memory_retain(found, &memory) : CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_unlock(&mapping_lock);
	if (result == CUDA_SUCCESS)
		*handle = found;
	return result;
}

/* As a file descriptor, which another process can be sent. */
API cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
				 unsigned long long flags)
{
	struct shared_memory memory;
	CUresult result = ready();
	int file;

	if (result != CUDA_SUCCESS)
		return result;
	if (!shareable || flags)
		return CUDA_ERROR_INVALID_VALUE;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	result = memory_retain(handle, &memory);
	if (result != CUDA_SUCCESS)
		return result;
	result = ring_request(CMD_IPC_EXPORT, memory.device, memory.handle, NULL);
	memory_release(handle);
	if (result != CUDA_SUCCESS)
		return result;
	file = memfd_create("shared memory", MFD_CLOEXEC);
	if (file < 0 || pwrite(file, &memory, sizeof(memory), 0) != sizeof(memory))
		return CUDA_ERROR_UNKNOWN;
	*(int *)shareable = file;
	return CUDA_SUCCESS;
}

API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
				   CUmemAllocationHandleType type)
{
	struct shared_memory memory;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!handle)
		return CUDA_ERROR_INVALID_VALUE;
	if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
		return CUDA_ERROR_NOT_SUPPORTED;
	if (pread((int)(intptr_t)shareable, &memory, sizeof(memory), 0) != sizeof(memory))
		return CUDA_ERROR_INVALID_VALUE;
	result = memory_import(&memory);
	if (result == CUDA_SUCCESS)
		*handle = memory.handle;
	return result;
}
