/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* PCIe: the link, its traffic as a rate that takes 20 ms to measure, and as cumulative counters. */
#include <errno.h>
#include <time.h>

#include "session.h"

static const long WINDOW_NS = 20000000;

static uint64_t bytes_of(const struct device_state *state, unsigned counter)
{
	return counter == NVML_PCIE_UTIL_TX_BYTES ? state->tx_bytes : state->rx_bytes;
}

/* Of a link of 16 lanes: the least that carries what copies get. */
EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkGeneration(nvmlDevice_t device, unsigned *generation)
{
	static const double LINK[] = {4e9, 8e9, 15.754e9, 31.508e9, 63.015e9, 121e9};
	unsigned index, found = 0;

	ENTER_GPU(device, &index, NULL);
	while (found + 1 < sizeof(LINK) / sizeof(LINK[0]) &&
	       LINK[found] < (double)session_facts(index)->copy_bytes_per_second)
		found++;
	return give(found + 1, generation);
}

EXPORT nvmlReturn_t nvmlDeviceGetMaxPcieLinkWidth(nvmlDevice_t device, unsigned *lanes)
{
	ENTER_GPU(device, NULL, NULL);
	return give(16, lanes);
}

EXPORT nvmlReturn_t nvmlDeviceGetCurrPcieLinkWidth(nvmlDevice_t device, unsigned *lanes)
{
	ENTER_GPU(device, NULL, NULL);
	return give(16, lanes);
}

/* KB/s. Blocks for the window, as the real call does. */
EXPORT nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *kilobytes_per_second)
{
	struct timespec window = {.tv_nsec = WINDOW_NS};
	struct device_state from, to;
	unsigned index;
	uint64_t bytes;

	ENTER_GPU(device, &index, &from);
	if (!kilobytes_per_second || counter > NVML_PCIE_UTIL_RX_BYTES)
		return NVML_ERROR_INVALID_ARGUMENT;
	while (nanosleep(&window, &window) < 0 && errno == EINTR)
		continue;
	TRY(session_state(index, &to));
	if (to.lost)
		return NVML_ERROR_GPU_IS_LOST;
	if (to.at_ns <= from.at_ns)
		return NVML_ERROR_UNKNOWN;
	bytes = bytes_of(&to, counter) - bytes_of(&from, counter);
	*kilobytes_per_second = (unsigned)((double)bytes / 1e3 / ((double)(to.at_ns - from.at_ns) / 1e9));
	return NVML_SUCCESS;
}

/* One refused field does not refuse the others. */
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values)
{
	struct device_state state;

	ENTER_GPU(device, NULL, &state);
	if (count <= 0 || !values)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (int at = 0; at < count; at++) {
		nvmlFieldValue_t *field = &values[at];

		field->timestamp = (long long)state.wall_us;
		field->latencyUsec = 0;
		field->valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
		field->nvmlReturn = NVML_SUCCESS;
		if (field->fieldId == NVML_FI_DEV_PCIE_COUNT_TX_BYTES)
			field->value.ullVal = state.tx_bytes;
		else if (field->fieldId == NVML_FI_DEV_PCIE_COUNT_RX_BYTES)
			field->value.ullVal = state.rx_bytes;
		else
			field->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
	}
	return NVML_SUCCESS;
}
