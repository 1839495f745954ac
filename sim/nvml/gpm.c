/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* GPM: averages over the time between two samples of a device's counters. */
#include <stdlib.h>

#include "session.h"

struct nvmlGpmSample_st {
	unsigned index; /* of the device; NO_DEVICE: nothing sampled yet */
	struct device_state state;
};

enum {
	NO_DEVICE = MAX_DEVICES,
};

static const double MIB = 1 << 20;

enum metric {
	GRAPHICS_UTIL = 1,
	SM_UTIL = 2,
	SM_OCCUPANCY = 3,
	ANY_TENSOR_UTIL = 5,
	DRAM_BW_UTIL = 10,
	PCIE_TX_PER_SEC = 20,
	PCIE_RX_PER_SEC = 21,
};

EXPORT nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support)
{
	ENTER_GPU(device, NULL, NULL);
	if (!support)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (support->version != NVML_GPM_SUPPORT_VERSION)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	support->isSupportedDevice = 1;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample)
{
	TRY(session_enter(__func__));
	if (!sample)
		return NVML_ERROR_INVALID_ARGUMENT;
	*sample = malloc(sizeof(**sample));
	if (!*sample)
		return NVML_ERROR_MEMORY;
	(*sample)->index = NO_DEVICE;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample)
{
	if (!sample)
		return NVML_ERROR_INVALID_ARGUMENT;
	free(sample);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample)
{
	struct device_state state;
	unsigned index;

	ENTER_GPU(device, &index, &state);
	if (!sample)
		return NVML_ERROR_INVALID_ARGUMENT;
	*sample = (struct nvmlGpmSample_st){index, state};
	return NVML_SUCCESS;
}

/* `device` is the GPU. */
EXPORT nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned instance, nvmlGpmSample_t sample)
{
	struct device_state state;
	unsigned gpu;

	ENTER_GPU(device, &gpu, NULL);
	if (!sample)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned index = session_device_count(); index < session_total_count(); index++) {
		const struct device_facts *facts = session_facts(index);

		if (!facts->present || facts->gpu != gpu || facts->gpu_instance != instance)
			continue;
		TRY(session_state(index, &state));
		*sample = (struct nvmlGpmSample_st){index, state};
		return NVML_SUCCESS;
	}
	return session_facts(gpu)->mig_mode ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
}

static void set(nvmlGpmMetric_t *metric, double value, const char *short_name, const char *long_name, const char *unit)
{
	metric->nvmlReturn = NVML_SUCCESS;
	metric->value = value;
	metric->metricInfo.shortName = short_name;
	metric->metricInfo.longName = long_name;
	metric->metricInfo.unit = unit;
}

static void compute(nvmlGpmMetric_t *metric, const struct device_state *from, const struct device_state *to)
{
	double elapsed_ns = (double)(to->at_ns - from->at_ns);
	double sm_percent = 100.0 * (double)(to->sm_active_ns - from->sm_active_ns) / elapsed_ns;

	switch (metric->metricId) {
	case GRAPHICS_UTIL:
		set(metric, 100.0 * (double)(to->busy_ns - from->busy_ns) / elapsed_ns, "graphics_util",
		    "Graphics utilization", "%");
		break;
	case SM_UTIL:
		set(metric, sm_percent, "sm_util", "SM utilization", "%");
		break;
	case SM_OCCUPANCY: /* in the model an SM with blocks on it is a full one */
		set(metric, sm_percent, "sm_occupancy", "SM occupancy", "%");
		break;
	case ANY_TENSOR_UTIL: /* a spinning kernel multiplies no matrices */
		set(metric, 0, "any_tensor_util", "Any tensor utilization", "%");
		break;
	case DRAM_BW_UTIL:
		set(metric,
		    100.0 * (double)(to->dram_bytes - from->dram_bytes) /
			    ((double)to->dram_bytes_per_second * elapsed_ns / 1e9),
		    "dram_bw_util", "DRAM bandwidth utilization", "%");
		break;
	case PCIE_TX_PER_SEC:
		set(metric, (double)(to->tx_bytes - from->tx_bytes) / MIB / (elapsed_ns / 1e9), "pcie_tx_per_sec",
		    "PCIe traffic from this GPU", "MiB/s");
		break;
	case PCIE_RX_PER_SEC:
		set(metric, (double)(to->rx_bytes - from->rx_bytes) / MIB / (elapsed_ns / 1e9), "pcie_rx_per_sec",
		    "PCIe traffic to this GPU", "MiB/s");
		break;
	default:
		metric->nvmlReturn = NVML_ERROR_NOT_SUPPORTED;
	}
}

EXPORT nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *request)
{
	nvmlGpmSample_t from, to;

	TRY(session_enter(__func__));
	if (!request)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (request->version != NVML_GPM_METRICS_GET_VERSION)
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	from = request->sample1;
	to = request->sample2;
	if (!from || !to || from->index == NO_DEVICE || from->index != to->index ||
	    to->state.at_ns <= from->state.at_ns)
		return NVML_ERROR_INVALID_ARGUMENT;
	for (unsigned at = 0; at < request->numMetrics; at++)
		compute(&request->metrics[at], &from->state, &to->state);
	return NVML_SUCCESS;
}
