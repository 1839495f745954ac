/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* What a pointer points to: memory of a device, or of the host that a device can read. */
#include "internal.h"

#include <string.h>

struct place {
	struct memory_range range;
	bool host;
};

static bool find(uint64_t pointer, struct place *place)
{
	*place = (struct place){0};
	if (memory_find(pointer, &place->range))
		return true;
	place->host = host_memory_find(pointer, &place->range);
	return place->host;
}

/* As wide as programs expect each attribute to be. */
static CUresult write(void *data, CUpointer_attribute attribute, const struct place *place, uint64_t pointer)
{
	const struct memory_range *range = &place->range;

	switch ((int)attribute) {
	case CU_POINTER_ATTRIBUTE_CONTEXT:
		return memcpy(data, &range->context, sizeof(range->context)), CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
		*(unsigned *)data = place->host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
		return CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_POINTER:
		return *(CUdeviceptr *)data = pointer, CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_HOST_POINTER:
		if (!place->host && !range->managed)
			return CUDA_ERROR_INVALID_VALUE;
		return *(void **)data = (void *)pointer, CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
		return *(bool *)data = range->managed, CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		return *(int *)data = range->context ? range->context->ordinal : 0, CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
		return *(uint64_t *)data = range->address, CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
		return *(size_t *)data = range->bytes, CUDA_SUCCESS;
	case CU_POINTER_ATTRIBUTE_MAPPED:
		return *(bool *)data = true, CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

API cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer)
{
	struct place place;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return data && find(pointer, &place) ? write(data, attribute, &place, pointer) : CUDA_ERROR_INVALID_VALUE;
}

static size_t width_of(CUpointer_attribute attribute)
{
	switch ((int)attribute) {
	case CU_POINTER_ATTRIBUTE_IS_MANAGED:
	case CU_POINTER_ATTRIBUTE_MAPPED:
		return sizeof(bool);
	case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
	case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
		return sizeof(int);
	default:
		return sizeof(void *);
	}
}

/* What does not hold for the pointer is 0, and no error; its device is then one that there is not. */
API cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer)
{
	struct place place;
	CUresult result = ready();
	bool known;

	if (result != CUDA_SUCCESS)
		return result;
	if (!count || !attributes || !data)
		return CUDA_ERROR_INVALID_VALUE;
	known = find(pointer, &place);
	for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
		memset(data[i], attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? -1 : 0, width_of(attributes[i]));
		if (!known)
			continue;
		result = write(data[i], attributes[i], &place, pointer);
		if (result == CUDA_ERROR_INVALID_VALUE)
			result = CUDA_SUCCESS;
	}
	return result;
}

/* Either of the two may be NULL. */
API cuMemGetAddressRange(CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer)
{
	struct memory_range range;
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!memory_find(pointer, &range))
		return CUDA_ERROR_NOT_FOUND;
	if (base)
		*base = range.address;
	if (bytes)
		*bytes = range.bytes;
	return CUDA_SUCCESS;
}
