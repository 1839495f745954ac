/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <stdio.h>
#include <string.h>

#define COMPUTE_MAJOR 9
#define COMPUTE_MINOR 0

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

static bool attribute_of(const struct device_facts *facts, int attribute, int *value)
{
	struct pci_address pci;

	parse_pci(facts->pci_bus_id, &pci);
	switch (attribute) {
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
	case 2: /* MAX_BLOCK_DIM_X */
	case 3: /* MAX_BLOCK_DIM_Y */
		return *value = 1024, true;
	case 4: /* MAX_BLOCK_DIM_Z */
		return *value = 64, true;
	case 5: /* MAX_GRID_DIM_X */
		return *value = 0x7fffffff, true;
	case 6: /* MAX_GRID_DIM_Y */
	case 7: /* MAX_GRID_DIM_Z */
		return *value = 65535, true;
	case CU_DEVICE_ATTRIBUTE_WARP_SIZE:
		return *value = 32, true;
	case CU_DEVICE_ATTRIBUTE_CLOCK_RATE:
		return *value = 1980000, true;
	case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
		return *value = (int)facts->sms, true;
	case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID:
		return *value = (int)pci.bus, true;
	case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
		return *value = (int)pci.device, true;
	case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
		return *value = (int)pci.domain, true;
	case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR:
		return *value = 2048, true;
	case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT:
		return *value = 2, true;
	case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
		return *value = 1, true;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR:
		return *value = COMPUTE_MAJOR, true;
	case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR:
		return *value = COMPUTE_MINOR, true;
	case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR:
		return *value = 32, true;
	default:
		return false;
	}
}

API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	return value && attribute_of(facts_of(device), (int)attribute, value) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
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
