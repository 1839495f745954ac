/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* MIG: which instances a GPU is split into, and what is fixed about each. */
#include <stdbool.h>

#include "session.h"

static nvmlReturn_t enter_instance(const char *function, nvmlDevice_t device, const struct device_facts **facts)
{
	unsigned index;

	TRY(session_enter_device(function, device, &index, NULL));
	*facts = session_facts(index);
	return (*facts)->is_instance ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
	unsigned index, mode;

	ENTER_GPU(device, &index, NULL);
	mode = session_facts(index)->mig_mode ? NVML_DEVICE_MIG_ENABLE : NVML_DEVICE_MIG_DISABLE;
	TRY(give(mode, current));
	return give(mode, pending);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
	unsigned index;

	ENTER_GPU(device, &index, NULL);
	return give(session_facts(index)->mig_mode ? MAX_INSTANCES : 0, count);
}

EXPORT nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned position, nvmlDevice_t *instance)
{
	unsigned gpu;

	ENTER_GPU(device, &gpu, NULL);
	if (!instance || position >= MAX_INSTANCES)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!session_facts(gpu)->mig_mode)
		return NVML_ERROR_NOT_SUPPORTED;
	for (unsigned index = session_device_count(); index < session_total_count(); index++) {
		const struct device_facts *facts = session_facts(index);

		if (!facts->present || facts->gpu != gpu || facts->position != position)
			continue;
		*instance = session_handle(index);
		return NVML_SUCCESS;
	}
	return NVML_ERROR_NOT_FOUND;
}

EXPORT nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_instance)
{
	unsigned index;

	ENTER_DEVICE(device, &index, NULL);
	return give(session_facts(index)->is_instance, is_instance);
}

EXPORT nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t instance, nvmlDevice_t *device)
{
	const struct device_facts *facts;

	TRY(enter_instance(__func__, instance, &facts));
	if (!device)
		return NVML_ERROR_INVALID_ARGUMENT;
	*device = session_handle(facts->gpu);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
	const struct device_facts *facts;

	TRY(enter_instance(__func__, device, &facts));
	return give(facts->gpu_instance, id);
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id)
{
	const struct device_facts *facts;

	TRY(enter_instance(__func__, device, &facts));
	return give(facts->compute_instance, id);
}

/* Answered for instances only. */
EXPORT nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	const struct device_facts *facts;
	unsigned index;

	ENTER_DEVICE(device, &index, NULL);
	if (!attributes)
		return NVML_ERROR_INVALID_ARGUMENT;
	facts = session_facts(index);
	if (!facts->is_instance)
		return NVML_ERROR_NOT_SUPPORTED;
	*attributes = (nvmlDeviceAttributes_t){.multiprocessorCount = facts->sms,
					       .sharedCopyEngineCount = facts->slices,
					       .sharedDecoderCount = facts->slices,
					       .gpuInstanceSliceCount = facts->slices,
					       .computeInstanceSliceCount = facts->slices,
					       .memorySizeMB = facts->memory_bytes >> 20};
	return NVML_SUCCESS;
}
