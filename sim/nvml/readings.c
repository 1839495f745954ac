/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* What changes about a device from moment to moment: memory, clocks, power, temperature, utilisation. */
#include <stdlib.h>

#include "session.h"

enum {
	MEMORY_CLOCK_MHZ = 3201,
	MAX_SM_CLOCK_MHZ = 1980,
};

static const uint64_t RECENT_US = 2000000;

/* Programs can have what is reserved, too. */
static unsigned long long free_bytes(unsigned long long total, unsigned long long used)
{
	return used < total ? total - used : 0;
}

/* The first version counts what the driver reserves as used; the second tells it apart. */
EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
	struct device_state state;
	unsigned index;

	ENTER_DEVICE(device, &index, &state);
	if (!memory)
		return NVML_ERROR_INVALID_ARGUMENT;
	memory->total = session_facts(index)->memory_bytes;
	memory->used = state.memory_used + state.memory_reserved;
	memory->free = free_bytes(memory->total, memory->used);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
	struct device_state state;
	unsigned index;

	ENTER_DEVICE(device, &index, &state);
	if (!memory)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (memory->version != NVML_STRUCT_VERSION(*memory, 2))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	memory->total = session_facts(index)->memory_bytes;
	memory->reserved = state.memory_reserved;
	memory->used = state.memory_used;
	memory->free = free_bytes(memory->total, memory->used + memory->reserved);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned clock, unsigned *mhz)
{
	struct device_state state;

	ENTER_GPU(device, NULL, &state);
	if (clock >= NVML_CLOCK_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	return give(clock == NVML_CLOCK_MEM ? MEMORY_CLOCK_MHZ : state.sm_clock_mhz, mhz);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned clock, unsigned *mhz)
{
	ENTER_GPU(device, NULL, NULL);
	if (clock >= NVML_CLOCK_COUNT)
		return NVML_ERROR_INVALID_ARGUMENT;
	return give(clock == NVML_CLOCK_MEM ? MEMORY_CLOCK_MHZ : MAX_SM_CLOCK_MHZ, mhz);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *milliwatts)
{
	struct device_state state;

	ENTER_GPU(device, NULL, &state);
	return give(state.power_mw, milliwatts);
}

EXPORT nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *milliwatts)
{
	struct device_state state;

	ENTER_GPU(device, NULL, &state);
	return give(state.power_limit_mw, milliwatts);
}

EXPORT nvmlReturn_t nvmlDeviceGetPowerManagementLimit(nvmlDevice_t device, unsigned *milliwatts)
{
	struct device_state state;

	ENTER_GPU(device, NULL, &state);
	return give(state.power_limit_mw, milliwatts);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius)
{
	struct device_state state;

	ENTER_GPU(device, NULL, &state);
	if (sensor != NVML_TEMPERATURE_GPU)
		return NVML_ERROR_INVALID_ARGUMENT;
	return give(state.temperature_c, celsius);
}

EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temperature)
{
	struct device_state state;

	ENTER_GPU(device, NULL, &state);
	if (!temperature || temperature->sensorType != NVML_TEMPERATURE_GPU)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (temperature->version != NVML_STRUCT_VERSION(*temperature, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	temperature->temperature = (int)state.temperature_c;
	return NVML_SUCCESS;
}

static nvmlReturn_t device_samples(unsigned index, uint64_t since_us, struct util_sample **samples, unsigned *count)
{
	struct query query = {.op = Q_DEVICE_SAMPLES, .device = index, .a = since_us};
	struct answer answer;
	void *items;

	TRY(session_ask(&query, &answer, &items));
	*samples = items;
	*count = answer.count;
	return NVML_SUCCESS;
}

/* The share of time with a kernel running, over the last sample. The model has no memory traffic: that part stays 0. */
EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *rates)
{
	struct device_state state;
	struct util_sample *samples;
	unsigned index, count;

	ENTER_GPU(device, &index, &state);
	if (!rates)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (session_facts(index)->mig_mode)
		return NVML_ERROR_NOT_SUPPORTED;
	TRY(device_samples(index, state.wall_us > RECENT_US ? state.wall_us - RECENT_US : 0, &samples, &count));
	*rates = (nvmlUtilization_t){.gpu = count ? samples[count - 1].percent : 0};
	free(samples);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, unsigned kind, unsigned long long since_us,
					 unsigned *value_type, unsigned *count, nvmlSample_t *to)
{
	struct util_sample *samples;
	unsigned index, have;
	nvmlReturn_t result = NVML_SUCCESS;

	ENTER_GPU(device, &index, NULL);
	if (!value_type || !count)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (kind != NVML_GPU_UTILIZATION_SAMPLES || session_facts(index)->mig_mode)
		return NVML_ERROR_NOT_SUPPORTED;
	TRY(device_samples(index, since_us, &samples, &have));
	*value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
	if (!have)
		result = NVML_ERROR_NOT_FOUND;
	else if (to && *count < have)
		have = *count; /* the real one fills what there is room for */
	for (unsigned at = 0; result == NVML_SUCCESS && to && at < have; at++)
		to[at] = (nvmlSample_t){samples[at].at_us, {.uiVal = samples[at].percent}};
	*count = have;
	free(samples);
	return result;
}
