/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Pinned host memory: allocated here, or the program's own that it registered. Both belong to a context. */
#include "internal.h"

#include <stdlib.h>
#include <sys/mman.h>

#ifndef MADV_POPULATE_WRITE /* Linux 5.14; a Debian 11 has older headers */
#define MADV_POPULATE_WRITE 23
#endif
#define PAGE 4096
#define ALLOCATION_FLAGS (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_WRITECOMBINED)

struct pinned {
	uint64_t address, bytes;
	bool registered; /* the memory is the program's */
	struct CUctx_st *context;
	struct pinned *next;
};

static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pinned *all_pinned;

void host_touch(void *pointer, size_t bytes)
{
	uint64_t first = (uint64_t)pointer / PAGE * PAGE, end = (uint64_t)pointer + bytes;

	/* Never changes a byte, never raises a signal. Before Linux 5.14, and for rubbish, it refuses: then nothing is
	 * touched, which no caller can do anything about. */
	if (end > first)
		madvise((void *)first, end - first, MADV_POPULATE_WRITE);
}

/* With pinned_lock. */
static struct pinned **find(uint64_t address, uint64_t bytes)
{
	struct pinned **link = &all_pinned;

	while (*link && ((*link)->address >= address + bytes || address >= (*link)->address + (*link)->bytes))
		link = &(*link)->next;
	return link;
}

/* False: part of it is there already. */
static bool add(struct pinned *pinned)
{
	bool fresh;

	pthread_mutex_lock(&pinned_lock);
	fresh = !*find(pinned->address, pinned->bytes);
	if (fresh) {
		pinned->next = all_pinned;
		all_pinned = pinned;
	}
	pthread_mutex_unlock(&pinned_lock);
	return fresh;
}

static void end(struct pinned *pinned)
{
	if (!pinned->registered)
		free((void *)pinned->address);
	free(pinned);
}

/* Begins at `pointer` and came about in that way; NULL: there is none. */
static struct pinned *take_out(const void *pointer, bool registered)
{
	struct pinned **link, *found;

	pthread_mutex_lock(&pinned_lock);
	link = find((uint64_t)pointer, 1);
	found = *link;
	if (found && (found->address != (uint64_t)pointer || found->registered != registered))
		found = NULL;
	if (found)
		*link = found->next;
	pthread_mutex_unlock(&pinned_lock);
	return found;
}

bool host_memory_find(uint64_t address, struct memory_range *range)
{
	const struct pinned *found;

	pthread_mutex_lock(&pinned_lock);
	found = *find(address, 1);
	if (found)
		*range = (struct memory_range){found->address, found->bytes, found->context, NO_DEVICE, false};
	pthread_mutex_unlock(&pinned_lock);
	return found;
}

void host_memory_forget(struct CUctx_st *context)
{
	pthread_mutex_lock(&pinned_lock);
	for (struct pinned **link = &all_pinned, *pinned; (pinned = *link);) {
		if (pinned->context != context) {
			link = &pinned->next;
			continue;
		}
		*link = pinned->next;
		end(pinned);
	}
	pthread_mutex_unlock(&pinned_lock);
}

static CUresult allocate(void **pointer, size_t bytes, unsigned flags)
{
	struct CUctx_st *context;
	struct pinned *pinned;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pointer || !bytes || bytes > SIZE_MAX - PAGE || flags & ~(unsigned)ALLOCATION_FLAGS)
		return CUDA_ERROR_INVALID_VALUE;
	*pointer = aligned_alloc(PAGE, (bytes + PAGE - 1) / PAGE * PAGE);
	pinned = *pointer ? malloc(sizeof(*pinned)) : NULL;
	if (!pinned) {
		free(*pointer);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*pinned = (struct pinned){(uint64_t)*pointer, bytes, false, context, NULL};
	add(pinned);
	return CUDA_SUCCESS;
}

static CUresult register_memory(void *pointer, size_t bytes, unsigned flags)
{
	struct CUctx_st *context;
	struct pinned *pinned;
	CUresult result = context_current(&context);

	(void)flags;
	if (result != CUDA_SUCCESS)
		return result;
	if (!pointer || !bytes || (uint64_t)pointer > UINT64_MAX - bytes)
		return CUDA_ERROR_INVALID_VALUE;
	pinned = malloc(sizeof(*pinned));
	if (!pinned)
		return CUDA_ERROR_OUT_OF_MEMORY;
	*pinned = (struct pinned){(uint64_t)pointer, bytes, true, context, NULL};
	if (add(pinned))
		return CUDA_SUCCESS;
	free(pinned);
	return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
}

/* Host and device see it at the same address. */
static CUresult device_pointer(CUdeviceptr *device, const void *host, unsigned flags)
{
	CUresult result = ready();
	bool known;

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&pinned_lock);
	known = *find((uint64_t)host, 1) != NULL;
	pthread_mutex_unlock(&pinned_lock);
	if (!device || flags || !known)
		return CUDA_ERROR_INVALID_VALUE;
	*device = (CUdeviceptr)host;
	return CUDA_SUCCESS;
}

API cuMemAllocHost(void **pointer, size_t bytes)
{
	return allocate(pointer, bytes, 0);
}

API cuMemHostAlloc(void **pointer, size_t bytes, unsigned flags)
{
	return allocate(pointer, bytes, flags);
}

API cuMemFreeHost(void *pointer)
{
	struct pinned *pinned;
	CUresult result = ready();

	if (result != CUDA_SUCCESS || !pointer)
		return result;
	pinned = take_out(pointer, false);
	if (!pinned)
		return CUDA_ERROR_INVALID_VALUE;
	end(pinned);
	return CUDA_SUCCESS;
}

API cuMemHostRegister(void *pointer, size_t bytes, unsigned flags)
{
	return register_memory(pointer, bytes, flags);
}

API cuMemHostUnregister(void *pointer)
{
	struct pinned *pinned;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	pinned = take_out(pointer, true);
	if (!pinned)
		return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
	end(pinned);
	return CUDA_SUCCESS;
}

API cuMemHostGetDevicePointer(CUdeviceptr *device, void *host, unsigned flags)
{
	return device_pointer(device, host, flags);
}

/* ---- the forms of before CUDA 3.2 ---- */

#include "exact_names.h"

API cuMemAllocHost(void **pointer, unsigned bytes)
{
	return allocate(pointer, bytes, 0);
}

API cuMemHostRegister(void *pointer, size_t bytes, unsigned flags)
{
	return register_memory(pointer, bytes, flags);
}

API cuMemHostGetDevicePointer(CUdeviceptr_v1 *device, void *host, unsigned flags)
{
	CUdeviceptr wide;
	CUresult result = device_pointer(&wide, host, flags);

	if (result != CUDA_SUCCESS)
		return result;
	if (!device || wide > UINT32_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	*device = (CUdeviceptr_v1)wide;
	return CUDA_SUCCESS;
}
