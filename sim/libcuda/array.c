/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Arrays hold memory like any other allocation; only the place of their bytes is not visible. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

struct CUarray_st {
	uint32_t magic;
	CUDA_ARRAY3D_DESCRIPTOR shape;
	uint64_t address;
};
struct CUmipmappedArray_st {
	uint32_t magic;
	uint64_t address;
};

static size_t format_bytes(CUarray_format format)
{
	switch (format) {
	case CU_AD_FORMAT_UNSIGNED_INT8:
	case CU_AD_FORMAT_SIGNED_INT8:
		return 1;
	case CU_AD_FORMAT_UNSIGNED_INT16:
	case CU_AD_FORMAT_SIGNED_INT16:
	case CU_AD_FORMAT_HALF:
		return 2;
	case CU_AD_FORMAT_UNSIGNED_INT32:
	case CU_AD_FORMAT_SIGNED_INT32:
	case CU_AD_FORMAT_FLOAT:
		return 4;
	}
	return 0;
}

static size_t at_least_1(size_t n)
{
	return n ? n : 1;
}

/* 0: not a shape, or larger than an address can say. */
static size_t bytes_of(const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	size_t bytes = format_bytes(d->Format);

	if (!d->Width || (d->NumChannels != 1 && d->NumChannels != 2 && d->NumChannels != 4) ||
	    __builtin_mul_overflow(bytes, d->NumChannels, &bytes) || __builtin_mul_overflow(bytes, d->Width, &bytes) ||
	    __builtin_mul_overflow(bytes, at_least_1(d->Height), &bytes) ||
	    __builtin_mul_overflow(bytes, at_least_1(d->Depth), &bytes))
		return 0;
	return bytes;
}

static size_t levels_bytes(CUDA_ARRAY3D_DESCRIPTOR shape, unsigned levels)
{
	size_t sum = 0;

	for (unsigned level = 0; level < levels; level++) {
		size_t bytes = bytes_of(&shape);

		if (!bytes || __builtin_add_overflow(sum, bytes, &sum))
			return 0;
		shape.Width = at_least_1(shape.Width / 2);
		shape.Height /= 2;
		if (!(shape.Flags & CUDA_ARRAY3D_LAYERED)) /* there it is the number of layers */
			shape.Depth /= 2;
	}
	return sum;
}

static unsigned most_levels(const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	size_t longest = d->Width > d->Height ? d->Width : d->Height;
	unsigned levels = 0;

	if (!(d->Flags & CUDA_ARRAY3D_LAYERED) && d->Depth > longest)
		longest = d->Depth;
	for (; longest; longest /= 2)
		levels++;
	return levels;
}

static CUresult take(size_t bytes, uint64_t *address)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	return bytes ? memory_take(context->device, context, bytes, MEMORY_ARRAY, address) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *shape)
{
	struct CUarray_st *array = calloc(1, sizeof(*array));
	CUresult result;

	if (!array)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = out ? take(bytes_of(shape), &array->address) : CUDA_ERROR_INVALID_VALUE;
	if (result != CUDA_SUCCESS) {
		free(array);
		return result;
	}
	array->magic = MAGIC_ARRAY;
	array->shape = *shape;
	*out = array;
	return CUDA_SUCCESS;
}

bool is_array(CUarray array)
{
	return array && array->magic == MAGIC_ARRAY;
}

size_t array_element_bytes(CUarray array)
{
	return format_bytes(array->shape.Format) * array->shape.NumChannels;
}

#define FLAT(d)                                                                                                        \
	(&(CUDA_ARRAY3D_DESCRIPTOR){                                                                                   \
		.Width = (d)->Width, .Height = (d)->Height, .Format = (d)->Format, .NumChannels = (d)->NumChannels})

API cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d)
{
	return d ? create(array, FLAT(d)) : CUDA_ERROR_INVALID_VALUE;
}

API cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d)
{
	return d ? create(array, d) : CUDA_ERROR_INVALID_VALUE;
}

API cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR *d, CUarray array)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_array(array))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!d)
		return CUDA_ERROR_INVALID_VALUE;
	*d = (CUDA_ARRAY_DESCRIPTOR){array->shape.Width, array->shape.Height, array->shape.Format,
				     array->shape.NumChannels};
	return CUDA_SUCCESS;
}

API cuArrayDestroy(CUarray array)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_array(array))
		return CUDA_ERROR_INVALID_HANDLE;
	result = memory_give_back(array->address, MEMORY_ARRAY);
	array->magic = 0;
	free(array);
	return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_CONTEXT_IS_DESTROYED : result;
}

API cuMipmappedArrayCreate(CUmipmappedArray *out, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned levels)
{
	struct CUmipmappedArray_st *array;
	CUresult result;

	if (!out || !d || !levels)
		return CUDA_ERROR_INVALID_VALUE;
	if (levels > most_levels(d))
		levels = most_levels(d);
	array = calloc(1, sizeof(*array));
	if (!array)
		return CUDA_ERROR_OUT_OF_MEMORY;
	array->magic = MAGIC_MIPMAP;
	result = take(levels_bytes(*d, levels), &array->address);
	if (result == CUDA_SUCCESS)
		*out = array;
	else
		free(array);
	return result;
}

API cuMipmappedArrayDestroy(CUmipmappedArray array)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!array || array->magic != MAGIC_MIPMAP)
		return CUDA_ERROR_INVALID_HANDLE;
	result = memory_give_back(array->address, MEMORY_ARRAY);
	array->magic = 0;
	free(array);
	return result == CUDA_ERROR_INVALID_VALUE ? CUDA_ERROR_CONTEXT_IS_DESTROYED : result;
}

/* ---- the forms of before CUDA 3.2 ---- */

#include "exact_names.h"

API cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *d)
{
	return d ? create(array, FLAT(d)) : CUDA_ERROR_INVALID_VALUE;
}

API cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d)
{
	if (!d)
		return CUDA_ERROR_INVALID_VALUE;
	return create(array,
		      &(CUDA_ARRAY3D_DESCRIPTOR){d->Width, d->Height, d->Depth, d->Format, d->NumChannels, d->Flags});
}

API cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *d, CUarray array)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_array(array))
		return CUDA_ERROR_INVALID_HANDLE;
	if (!d)
		return CUDA_ERROR_INVALID_VALUE;
	*d = (CUDA_ARRAY_DESCRIPTOR_v1){(unsigned)array->shape.Width, (unsigned)array->shape.Height,
					array->shape.Format, array->shape.NumChannels};
	return CUDA_SUCCESS;
}
