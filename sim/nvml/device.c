/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Which devices there are, and what is fixed about each. */
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "session.h"

enum {
	CORES_PER_SM = 128, /* compute capability 9.0 */
};

/* NVML takes "0000:01:00.0" for the "00000000:01:00.0" that it prints. */
static bool same_bus_id(const char *left, const char *right)
{
	unsigned a[4], b[4];

	return sscanf(left, "%x:%x:%x.%x", &a[0], &a[1], &a[2], &a[3]) == 4 &&
	       sscanf(right, "%x:%x:%x.%x", &b[0], &b[1], &b[2], &b[3]) == 4 && !memcmp(a, b, sizeof(a));
}

static nvmlReturn_t give_handle(unsigned index, nvmlDevice_t *device)
{
	struct device_state state;

	TRY(session_state(index, &state));
	if (state.lost)
		return NVML_ERROR_GPU_IS_LOST;
	*device = session_handle(index);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
	TRY(session_enter(__func__));
	return give(session_device_count(), count);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
	TRY(session_enter(__func__));
	if (!device || index >= session_device_count())
		return NVML_ERROR_INVALID_ARGUMENT;
	return give_handle(index, device);
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
	struct device_state state;

	TRY(session_enter(__func__));
	if (!uuid || !device)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(session_state(0, &state)); /* what there is may have changed */
	for (unsigned index = 0; index < session_total_count(); index++)
		if (session_facts(index)->present && !strcasecmp(uuid, session_facts(index)->uuid))
			return give_handle(index, device);
	return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
	TRY(session_enter(__func__));
	if (!bus_id || !device)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned index = 0; index < session_device_count(); index++)
		if (same_bus_id(bus_id, session_facts(index)->pci_bus_id))
			return give_handle(index, device);
	return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length)
{
	unsigned index;

	ENTER_DEVICE(device, &index, NULL);
	return give_text(session_facts(index)->name, name, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length)
{
	unsigned index;

	ENTER_DEVICE(device, &index, NULL);
	return give_text(session_facts(index)->uuid, uuid, length);
}

EXPORT nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *to)
{
	unsigned index;

	ENTER_DEVICE(device, &index, NULL);
	return give(session_facts(index)->is_instance ? session_facts(index)->position : index, to);
}

EXPORT nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor)
{
	unsigned index;

	ENTER_GPU(device, &index, NULL);
	return give(index, minor);
}

EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
	unsigned index, function;
	const char *bus_id;

	ENTER_GPU(device, &index, NULL);
	if (!pci)
		return NVML_ERROR_INVALID_ARGUMENT;
	*pci = (nvmlPciInfo_t){.pciDeviceId = 0x233510de, .pciSubSystemId = 0x18be10de};
	bus_id = session_facts(index)->pci_bus_id;
	if (sscanf(bus_id, "%x:%x:%x.%x", &pci->domain, &pci->bus, &pci->device, &function) != 4)
		return NVML_ERROR_UNKNOWN;
	snprintf(pci->busId, sizeof(pci->busId), "%s", bus_id);
	snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.%X", pci->domain & 0xffff, pci->bus & 0xff,
		 pci->device & 0xff, function & 0xf);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned *cores)
{
	unsigned index;

	ENTER_GPU(device, &index, NULL);
	return give(session_facts(index)->sms * CORES_PER_SM, cores);
}

EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
	ENTER_GPU(device, NULL, NULL);
	if (!major || !minor)
		return NVML_ERROR_INVALID_ARGUMENT;
	*major = 9;
	*minor = 0;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture)
{
	ENTER_GPU(device, NULL, NULL);
	return give(NVML_DEVICE_ARCH_HOPPER, architecture);
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode)
{
	ENTER_GPU(device, NULL, NULL);
	return give(NVML_FEATURE_ENABLED, mode);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeMode(nvmlDevice_t device, unsigned *mode)
{
	ENTER_GPU(device, NULL, NULL);
	return give(NVML_COMPUTEMODE_DEFAULT, mode);
}
