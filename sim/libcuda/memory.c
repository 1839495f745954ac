/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>

/* Above the heap of a program that is not position-independent, below what address sanitizers take. */
#define LOW_FIRST 0x20000000ull
#define LOW_END 0x60000000ull
#define LOW_STEP 512
#define PITCH 512

struct allocation {
	uint64_t address, bytes; /* as the program has it */
	uint64_t server_address;
	uint32_t device;
	enum memory_kind kind;
	struct CUctx_st *context; /* NULL: physical memory, which belongs to no context */
	unsigned references; /* of physical memory: handles and mappings */
	bool foreign; /* another process made it */
	bool managed;
};

static pthread_mutex_t memory_lock = PTHREAD_MUTEX_INITIALIZER;
static struct allocation *allocations;
static size_t allocation_count, allocation_room;
static _Atomic bool low_reserved;

static bool is_low(uint64_t address)
{
	return address >= LOW_FIRST && address < LOW_END;
}

bool is_device_address(uint64_t address)
{
	return (address >= FIRST_DEVICE_ADDRESS && address < END_DEVICE_ADDRESS) ||
	       (is_low(address) && atomic_load(&low_reserved));
}

/* ---- what we hold ---- */

/* With memory_lock. The caller fills the place. */
static struct allocation *place(void)
{
	if (allocation_count == allocation_room) {
		size_t room = allocation_room ? allocation_room * 2 : 64;
		struct allocation *larger = realloc(allocations, room * sizeof(*larger));

		if (!larger)
			return NULL;
		allocations = larger;
		allocation_room = room;
	}
	return &allocations[allocation_count++];
}

/* With memory_lock. Nothing of the program may come to lie where the old calls' 32-bit pointers point. */
static bool low_reserve(void)
{
	void *wanted = (void *)LOW_FIRST;
	int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;

	if (!atomic_load(&low_reserved))
		atomic_store(&low_reserved, mmap(wanted, LOW_END - LOW_FIRST, PROT_NONE, flags, -1, 0) == wanted);
	return atomic_load(&low_reserved);
}

/* With memory_lock: the first gap. 0: none. */
static uint64_t low_address(uint64_t bytes)
{
	uint64_t at = LOW_FIRST;
	size_t i = 0;

	if (bytes > LOW_END - LOW_FIRST || !low_reserve())
		return 0;
	while (i < allocation_count && at + bytes <= LOW_END) {
		const struct allocation *a = &allocations[i++];

		if (a->address < at + bytes && at < a->address + a->bytes) {
			at = (a->address + a->bytes + LOW_STEP - 1) / LOW_STEP * LOW_STEP;
			i = 0;
		}
	}
	return at + bytes <= LOW_END ? at : 0;
}

/* Where the program finds it. 0: no room. */
static uint64_t remember(struct allocation allocation)
{
	struct allocation *to;

	pthread_mutex_lock(&memory_lock);
	if (allocation.kind == MEMORY_LOW)
		allocation.address = low_address(allocation.bytes);
	to = allocation.address ? place() : NULL;
	if (to)
		*to = allocation;
	pthread_mutex_unlock(&memory_lock);
	return to ? allocation.address : 0;
}

/* What cuMemFree takes: memory that came as a pointer. */
static bool is_pointer(enum memory_kind kind)
{
	return kind == MEMORY_PLAIN || kind == MEMORY_LOW;
}

static bool forget(uint64_t address, enum memory_kind kind, struct allocation *found)
{
	bool known = false;

	pthread_mutex_lock(&memory_lock);
	for (size_t i = allocation_count; i-- > 0 && !known;) {
		const struct allocation *a = &allocations[i];

		if (a->address != address || (a->kind != kind && !(is_pointer(a->kind) && is_pointer(kind))))
			continue;
		*found = *a;
		allocations[i] = allocations[--allocation_count];
		known = true;
	}
	pthread_mutex_unlock(&memory_lock);
	return known;
}

bool memory_find(uint64_t address, struct memory_range *range)
{
	bool known = false;

	pthread_mutex_lock(&memory_lock);
	for (size_t i = 0; i < allocation_count && !known; i++) {
		const struct allocation *a = &allocations[i];

		known = is_pointer(a->kind) && address - a->address < a->bytes;
		if (known)
			*range = (struct memory_range){a->address, a->bytes, a->context, a->device, a->managed};
	}
	pthread_mutex_unlock(&memory_lock);
	return known;
}

uint32_t device_at(uint64_t address)
{
	struct memory_range range;

	return memory_find(address, &range) ? range.device : NO_DEVICE;
}

CUresult memory_take(uint32_t device, struct CUctx_st *context, size_t bytes, enum memory_kind kind, uint64_t *address)
{
	uint64_t values[2];
	CUresult result = ring_request(CMD_ALLOC, device, bytes, values);

	if (result != CUDA_SUCCESS)
		return result;
	if (context && context->primary)
		context = context->primary;
	*address = remember((struct allocation){values[0], bytes, values[0], device, kind, context, 1, false, false});
	if (*address)
		return CUDA_SUCCESS;
	ring_request(CMD_FREE, device, values[0], NULL);
	return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult memory_give_back(uint64_t address, enum memory_kind kind)
{
	struct allocation found;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!forget(address, kind, &found)) /* what a graph left is its own again when it is launched next */
		return kind == MEMORY_PLAIN && is_graph_address(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	return ring_request(found.foreign ? CMD_IPC_CLOSE : CMD_FREE, found.device, found.server_address, NULL);
}

/* ---- physical memory, which lives until its last handle is released and its last mapping is gone ---- */

/* With memory_lock. */
static struct allocation *physical(uint64_t handle)
{
	for (size_t i = allocation_count; i-- > 0;)
		if (allocations[i].kind == MEMORY_PHYSICAL && allocations[i].address == handle)
			return &allocations[i];
	return NULL;
}

CUresult memory_retain(uint64_t handle, struct shared_memory *memory)
{
	CUresult result = ready();
	struct allocation *found;

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&memory_lock);
	found = physical(handle);
	if (found) {
		found->references++;
		*memory = (struct shared_memory){found->address, found->bytes, found->device};
	}
	pthread_mutex_unlock(&memory_lock);
	return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult memory_release(uint64_t handle)
{
	CUresult result = ready();
	struct allocation *found;
	bool last;

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&memory_lock);
	found = physical(handle);
	last = found && --found->references == 0;
	pthread_mutex_unlock(&memory_lock);
	if (last)
		return memory_give_back(handle, MEMORY_PHYSICAL);
	return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult memory_import(const struct shared_memory *memory)
{
	struct shared_memory own;
	CUresult result = memory_retain(memory->handle, &own);

	if (result != CUDA_ERROR_INVALID_VALUE)
		return result;
	result = ring_request(CMD_IPC_OPEN, memory->device, memory->handle, NULL);
	if (result != CUDA_SUCCESS)
		return result;
	if (remember((struct allocation){memory->handle, memory->bytes, memory->handle, memory->device, MEMORY_PHYSICAL,
					 NULL, 1, true, false}))
		return CUDA_SUCCESS;
	ring_request(CMD_IPC_CLOSE, memory->device, memory->handle, NULL);
	return CUDA_ERROR_OUT_OF_MEMORY;
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
		ring_request(CMD_FREE, found.device, found.server_address, NULL);
	}
}

static CUresult take_here(size_t bytes, enum memory_kind kind, uint64_t *address)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	return bytes ? memory_take(context->device, context, bytes, kind, address) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes)
{
	uint64_t address;
	CUresult result = pointer ? take_here(bytes, MEMORY_PLAIN, &address) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*pointer = address;
	return result;
}

static CUresult allocate_managed(CUdeviceptr *pointer, size_t bytes, unsigned flags)
{
	CUresult result = flags ? allocate(pointer, bytes) : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&memory_lock);
	for (size_t i = 0; i < allocation_count; i++)
		if (allocations[i].address == *pointer)
			allocations[i].managed = true;
	pthread_mutex_unlock(&memory_lock);
	return CUDA_SUCCESS;
}

static CUresult allocate_on(CUdeviceptr *pointer, size_t bytes, CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_resolve(handle, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	return stream->capture ? capture_allocation(stream, bytes, pointer) : allocate(pointer, bytes);
}

static CUresult release_on(CUdeviceptr pointer, CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_resolve(handle, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	return stream->capture ? capture_free(stream, pointer) : memory_give_back(pointer, MEMORY_PLAIN);
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

/* The row and the bytes of all rows. */
static CUresult pitch_of(size_t width, size_t height, unsigned element_bytes, size_t *row, size_t *bytes)
{
	if (!width || !height || (element_bytes != 4 && element_bytes != 8 && element_bytes != 16) ||
	    width > SIZE_MAX - PITCH)
		return CUDA_ERROR_INVALID_VALUE;
	*row = (width + PITCH - 1) / PITCH * PITCH;
	return __builtin_mul_overflow(*row, height, bytes) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

API cuMemAllocPitch(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned element_bytes)
{
	size_t row, bytes;
	CUresult result = pitch ? pitch_of(width, height, element_bytes, &row, &bytes) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		result = allocate(pointer, bytes);
	if (result == CUDA_SUCCESS)
		*pitch = row;
	return result;
}

API cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned flags)
{
	return allocate_managed(pointer, bytes, flags);
}

API2(cuMemAllocAsync, cuMemAllocAsync_ptsz, (CUdeviceptr * pointer, size_t bytes, CUstream stream),
     allocate_on(pointer, bytes, stream))
API2(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz,
     (CUdeviceptr * pointer, size_t bytes, CUmemoryPool pool, CUstream stream),
     ((void)pool, allocate_on(pointer, bytes, stream)))

API cuMemFree(CUdeviceptr pointer)
{
	return pointer ? memory_give_back(pointer, MEMORY_PLAIN) : ready();
}

API2(cuMemFreeAsync, cuMemFreeAsync_ptsz, (CUdeviceptr pointer, CUstream stream), release_on(pointer, stream))

/* ---- exports: the forms of before CUDA 3.2, whose pointers have 32 bits ---- */

#include "exact_names.h"

static CUresult allocate_low(CUdeviceptr_v1 *pointer, size_t bytes)
{
	uint64_t address;
	CUresult result = pointer ? take_here(bytes, MEMORY_LOW, &address) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*pointer = (CUdeviceptr_v1)address;
	return result;
}

API cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned bytes)
{
	return allocate_low(pointer, bytes);
}

API cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned *pitch, unsigned width, unsigned height, unsigned element_bytes)
{
	size_t row, bytes;
	CUresult result = pitch ? pitch_of(width, height, element_bytes, &row, &bytes) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		result = allocate_low(pointer, bytes);
	if (result == CUDA_SUCCESS)
		*pitch = (unsigned)row;
	return result;
}

API cuMemFree(CUdeviceptr_v1 pointer)
{
	return pointer ? memory_give_back(pointer, MEMORY_PLAIN) : ready();
}
