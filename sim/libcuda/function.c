/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* What a function needs of an SM, and so how many of its blocks fit on one. A kernel is the function itself. */
#include "internal.h"

#define SM_THREADS 2048
#define SM_BLOCKS 32
#define WARP 32

CUresult function_check(CUfunction function)
{
	return function && function->magic == MAGIC_FUNCTION ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* ---- attributes ---- */

unsigned dynamic_room(const struct CUfunc_st *function)
{
	if (function->dynamic_bytes)
		return function->dynamic_bytes;
	return function->shared_bytes < SHARED_BYTES ? SHARED_BYTES - function->shared_bytes : 0;
}

static CUresult get(int *value, CUfunction_attribute attribute, CUfunction function)
{
	CUresult result = ready();

	if (result == CUDA_SUCCESS)
		result = value && (unsigned)attribute < CU_FUNC_ATTRIBUTE_MAX ? function_check(function)
									      : CUDA_ERROR_INVALID_VALUE;
	if (result != CUDA_SUCCESS)
		return result;
	switch (attribute) {
	case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
		return *value = (int)function->max_threads, CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES:
		return *value = (int)function->shared_bytes, CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_NUM_REGS:
		return *value = function->registers, CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_PTX_VERSION:
		return *value = function->ptx_arch, CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_BINARY_VERSION:
		return *value = DEVICE_ARCH, CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES:
		return *value = (int)dynamic_room(function), CUDA_SUCCESS;
	case CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT:
		return *value = -1, CUDA_SUCCESS;
	default:
		return *value = 0, CUDA_SUCCESS;
	}
}

/* Of those that can be set, the bytes of shared memory alone change what may be launched. */
static CUresult set(CUfunction function, CUfunction_attribute attribute, int value)
{
	CUresult result = ready();

	if (result == CUDA_SUCCESS)
		result = function_check(function);
	if (result != CUDA_SUCCESS)
		return result;
	if (attribute == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT)
		return value >= -1 && value <= 100 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
	if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0 ||
	    (unsigned)value + function->shared_bytes > SHARED_BYTES_OPTIN)
		return CUDA_ERROR_INVALID_VALUE;
	function->dynamic_bytes = (unsigned)value;
	return CUDA_SUCCESS;
}

API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
	return get(value, attribute, function);
}

API cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	return result == CUDA_SUCCESS ? get(value, attribute, (CUfunction)kernel) : result;
}

API cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
	return set(function, attribute, value);
}

API cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	return result == CUDA_SUCCESS ? set((CUfunction)kernel, attribute, value) : result;
}

/* A preference between caches, which are not modelled. */
static CUresult prefer_cache(CUfunction function, CUfunc_cache cache)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return (unsigned)cache <= CU_FUNC_CACHE_PREFER_EQUAL ? function_check(function) : CUDA_ERROR_INVALID_VALUE;
}

API cuFuncSetCacheConfig(CUfunction function, CUfunc_cache cache)
{
	return prefer_cache(function, cache);
}

API cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache cache, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	return result == CUDA_SUCCESS ? prefer_cache((CUfunction)kernel, cache) : result;
}

API cuFuncGetName(const char **name, CUfunction function)
{
	CUresult result = name ? function_check(function) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*name = function->name;
	return result;
}

API cuKernelGetName(const char **name, CUkernel kernel)
{
	CUresult result = name ? function_check((CUfunction)kernel) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*name = ((CUfunction)kernel)->name;
	return result;
}

/* ---- occupancy: as the model fits blocks, by threads and by their number ---- */

static CUresult resident(int *blocks, CUfunction function, int threads)
{
	CUresult result = ready();

	if (result == CUDA_SUCCESS)
		result = blocks && threads > 0 ? function_check(function) : CUDA_ERROR_INVALID_VALUE;
	if (result != CUDA_SUCCESS)
		return result;
	if ((unsigned)threads > function->max_threads)
		*blocks = 0;
	else
		*blocks = SM_THREADS / threads > SM_BLOCKS ? SM_BLOCKS : SM_THREADS / threads;
	return CUDA_SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared_bytes)
{
	(void)shared_bytes;
	return resident(blocks, function, threads);
}

API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int threads,
							 size_t shared_bytes, unsigned flags)
{
	(void)shared_bytes;
	return flags & ~1u ? CUDA_ERROR_INVALID_VALUE : resident(blocks, function, threads);
}

/* The largest block of which as many fit that no thread of the SM is without work. */
static CUresult suggest(int *blocks, int *threads, CUfunction function, int most)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result == CUDA_SUCCESS)
		result = blocks && threads && most >= 0 ? function_check(function) : CUDA_ERROR_INVALID_VALUE;
	if (result != CUDA_SUCCESS)
		return result;
	*threads = (int)function->max_threads;
	if (most && most < *threads)
		*threads = most;
	if (*threads >= WARP)
		*threads -= *threads % WARP;
	*blocks = SM_THREADS / *threads > SM_BLOCKS ? SM_BLOCKS : SM_THREADS / *threads;
	*blocks *= (int)facts_of(context->ordinal)->sms;
	return CUDA_SUCCESS;
}

API cuOccupancyMaxPotentialBlockSize(int *blocks, int *threads, CUfunction function, CUoccupancyB2DSize bytes_of,
				     size_t shared_bytes, int most)
{
	(void)bytes_of, (void)shared_bytes;
	return suggest(blocks, threads, function, most);
}

API cuOccupancyMaxPotentialBlockSizeWithFlags(int *blocks, int *threads, CUfunction function,
					      CUoccupancyB2DSize bytes_of, size_t shared_bytes, int most,
					      unsigned flags)
{
	(void)bytes_of, (void)shared_bytes;
	return flags & ~1u ? CUDA_ERROR_INVALID_VALUE : suggest(blocks, threads, function, most);
}
