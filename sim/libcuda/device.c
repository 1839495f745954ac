/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <stdio.h>
#include <string.h>

API cuInit(unsigned flags)
{
	return flags ? CUDA_ERROR_INVALID_VALUE : connection_open();
}

API cuDriverGetVersion(int *version)
{
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = CUDA_VERSION;
	return CUDA_SUCCESS;
}

API cuDeviceGetCount(int *count)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!count)
		return CUDA_ERROR_INVALID_VALUE;
	*count = connection.devices;
	return CUDA_SUCCESS;
}

API cuDeviceGet(CUdevice *device, int ordinal)
{
	CUresult result = ready_ordinal(ordinal);

	if (result != CUDA_SUCCESS)
		return result;
	if (!device)
		return CUDA_ERROR_INVALID_VALUE;
	*device = ordinal;
	return CUDA_SUCCESS;
}

API cuDeviceGetName(char *name, int length, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	if (!name || length <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(name, (size_t)length, "%s", facts_of(device)->name);
	return CUDA_SUCCESS;
}

static int hex_digit(char c)
{
	if (c >= '0' && c <= '9')
		return c - '0';
	if (c >= 'a' && c <= 'f')
		return c - 'a' + 10;
	return c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static CUresult uuid_of(CUuuid *uuid, CUdevice device, bool of_instance)
{
	CUresult result = ready_ordinal(device);
	const struct device_facts *facts;
	int digits = 0;

	if (result != CUDA_SUCCESS)
		return result;
	if (!uuid)
		return CUDA_ERROR_INVALID_VALUE;
	facts = facts_of(device);
	if (!of_instance)
		facts = &connection.welcome.facts[facts->gpu];
	memset(uuid, 0, sizeof(*uuid));
	for (const char *c = facts->uuid + 4; *c && digits < 32; c++) {
		int value = hex_digit(*c);

		if (value < 0)
			continue;
		uuid->bytes[digits / 2] = (char)(((unsigned char)uuid->bytes[digits / 2] << 4) | value);
		digits++;
	}
	return CUDA_SUCCESS;
}

API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
	return uuid_of(uuid, device, true);
}

#undef cuDeviceGetUuid
API cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
/* The first version knows nothing of MIG. */
API cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
	return uuid_of(uuid, device, false);
}

struct pci_address {
	unsigned domain, bus, device, function;
};

static bool parse_pci(const char *text, struct pci_address *pci)
{
	*pci = (struct pci_address){0};
	return sscanf(text, "%x:%x:%x.%x", &pci->domain, &pci->bus, &pci->device, &pci->function) == 4 ||
	       sscanf(text, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device) == 3 ||
	       (pci->domain = 0, sscanf(text, "%x:%x.%x", &pci->bus, &pci->device, &pci->function) == 3);
}

/* Those that are the same for every device, by number; the others that are not here are what is not modelled: 0. */
static const int ATTRIBUTES[CU_DEVICE_ATTRIBUTE_MAX] = {
	[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = MAX_BLOCK,
	[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X] = MAX_BLOCK,
	[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y] = MAX_BLOCK,
	[CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z] = 64,
	[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X] = 0x7fffffff,
	[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y] = 65535,
	[CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z] = 65535,
	[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK] = SHARED_BYTES,
	[CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY] = 65536,
	[CU_DEVICE_ATTRIBUTE_WARP_SIZE] = 32,
	[CU_DEVICE_ATTRIBUTE_MAX_PITCH] = 0x7fffffff,
	[CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK] = 65536,
	[CU_DEVICE_ATTRIBUTE_CLOCK_RATE] = 1980000,
	[CU_DEVICE_ATTRIBUTE_TEXTURE_ALIGNMENT] = 512,
	[CU_DEVICE_ATTRIBUTE_GPU_OVERLAP] = 1,
	[CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY] = 1,
	[CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS] = 1,
	[CU_DEVICE_ATTRIBUTE_ECC_ENABLED] = 1,
	[CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE] = 3201000,
	[CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH] = 6144,
	[CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE] = 50 << 20,
	[CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR] = 2048,
	[CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT] = 2,
	[CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING] = 1,
	[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR] = DEVICE_ARCH / 10,
	[CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR] = DEVICE_ARCH % 10,
	[CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED] = 1,
	[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR] = 233472,
	[CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR] = 65536,
	[CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY] = 1,
	[CU_DEVICE_ATTRIBUTE_COMPUTE_PREEMPTION_SUPPORTED] = 1,
	[CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM] = 1,
	[CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH] = 1,
	[CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN] = SHARED_BYTES_OPTIN,
	[CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED] = 1,
	[CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED] = 1,
	[CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED] = 1,
	[CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR] = 32,
	[CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK] = RESERVED_SHARED_BYTES,
};

static int attribute_of(const struct device_facts *facts, CUdevice_attribute attribute)
{
	struct pci_address pci;

	parse_pci(facts->pci_bus_id, &pci);
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
		return (int)facts->sms;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
		return (int)pci.bus;
	case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
		return (int)pci.device;
	case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
		return (int)pci.domain;
	default:
		return ATTRIBUTES[attribute];
	}
}

API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	if (!value || (int)attribute < 1 || attribute >= CU_DEVICE_ATTRIBUTE_MAX)
		return CUDA_ERROR_INVALID_VALUE;
	*value = attribute_of(facts_of(device), attribute);
	return CUDA_SUCCESS;
}

API cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	if (!major || !minor)
		return CUDA_ERROR_INVALID_VALUE;
	*major = DEVICE_ARCH / 10;
	*minor = DEVICE_ARCH % 10;
	return CUDA_SUCCESS;
}

API cuDeviceTotalMem(size_t *bytes, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	if (!bytes)
		return CUDA_ERROR_INVALID_VALUE;
	*bytes = facts_of(device)->memory_bytes;
	return CUDA_SUCCESS;
}

API cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
	CUresult result = ready_ordinal(device);
	struct pci_address pci;

	if (result != CUDA_SUCCESS)
		return result;
	if (!text || length <= 0 || !parse_pci(facts_of(device)->pci_bus_id, &pci))
		return CUDA_ERROR_INVALID_VALUE;
	snprintf(text, (size_t)length, "%04x:%02x:%02x.%x", pci.domain, pci.bus, pci.device, pci.function);
	return CUDA_SUCCESS;
}

API cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
	CUresult result = ready();
	struct pci_address wanted, pci;

	if (result != CUDA_SUCCESS)
		return result;
	if (!device || !text || !parse_pci(text, &wanted))
		return CUDA_ERROR_INVALID_VALUE;
	for (int i = 0; i < connection.devices; i++)
		if (parse_pci(facts_of(i)->pci_bus_id, &pci) && pci.domain == wanted.domain && pci.bus == wanted.bus &&
		    pci.device == wanted.device) {
			*device = i;
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_INVALID_DEVICE;
}
