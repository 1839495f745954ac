/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The part of NVML's interface that the simulated GPU offers: the real names, numbers and layouts. */
#pragma once

#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

typedef enum {
	NVML_SUCCESS = 0,
	NVML_ERROR_UNINITIALIZED = 1,
	NVML_ERROR_INVALID_ARGUMENT = 2,
	NVML_ERROR_NOT_SUPPORTED = 3,
	NVML_ERROR_NO_PERMISSION = 4,
	NVML_ERROR_NOT_FOUND = 6,
	NVML_ERROR_INSUFFICIENT_SIZE = 7,
	NVML_ERROR_DRIVER_NOT_LOADED = 9,
	NVML_ERROR_TIMEOUT = 10,
	NVML_ERROR_GPU_IS_LOST = 15,
	NVML_ERROR_MEMORY = 20,
	NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
	NVML_ERROR_UNKNOWN = 999,
} nvmlReturn_t;

typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;
typedef struct nvmlGpmSample_st *nvmlGpmSample_t;

enum {
	NVML_CLOCK_MEM = 2,
	NVML_CLOCK_COUNT = 4,
	NVML_GPU_UTILIZATION_SAMPLES = 1,
	NVML_VALUE_TYPE_UNSIGNED_INT = 1,
	NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3,
	NVML_PCIE_UTIL_TX_BYTES = 0,
	NVML_PCIE_UTIL_RX_BYTES = 1,
	NVML_FI_DEV_PCIE_COUNT_TX_BYTES = 197,
	NVML_FI_DEV_PCIE_COUNT_RX_BYTES = 198,
	NVML_TEMPERATURE_GPU = 0,
	NVML_FEATURE_ENABLED = 1,
	NVML_COMPUTEMODE_DEFAULT = 0,
	NVML_DEVICE_ARCH_HOPPER = 9,
	NVML_DEVICE_MIG_DISABLE = 0,
	NVML_DEVICE_MIG_ENABLE = 1,
	NVML_EVENT_TYPE_XID_CRITICAL_ERROR = 8,
	NVML_GPM_METRICS_GET_VERSION = 1,
	NVML_GPM_SUPPORT_VERSION = 1,
};

/* A struct's version field: its size and its number, as the callers compose it. */
#define NVML_STRUCT_VERSION(type, number) ((unsigned)sizeof(type) | (unsigned)(number) << 24)
#define NVML_NO_INSTANCE 0xffffffffu

typedef union {
	double dVal;
	unsigned uiVal;
	unsigned long ulVal;
	unsigned long long ullVal;
	long long sllVal;
} nvmlValue_t;

typedef struct {
	char busIdLegacy[16];
	unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
	char busId[32];
} nvmlPciInfo_t;

typedef struct {
	unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
	unsigned version;
	unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
	unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
	unsigned long long timeStamp;
	nvmlValue_t sampleValue;
} nvmlSample_t;

typedef struct {
	unsigned pid;
	unsigned long long timeStamp;
	unsigned smUtil, memUtil, encUtil, decUtil;
} nvmlProcessUtilizationSample_t;

typedef struct {
	unsigned long long timeStamp;
	unsigned pid, smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;

typedef struct {
	unsigned version, processSamplesCount;
	unsigned long long lastSeenTimeStamp;
	nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_v1_t;

typedef struct {
	unsigned pid;
	unsigned long long usedGpuMemory;
} nvmlProcessInfo_v1_t;

typedef struct {
	unsigned pid;
	unsigned long long usedGpuMemory;
	unsigned gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

typedef struct {
	unsigned fieldId, scopeId;
	long long timestamp, latencyUsec;
	unsigned valueType;
	nvmlReturn_t nvmlReturn;
	nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
	unsigned version, sensorType;
	int temperature;
} nvmlTemperature_v1_t;

typedef struct {
	nvmlDevice_t device;
	unsigned long long eventType, eventData;
	unsigned gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef struct {
	unsigned version, isSupportedDevice;
} nvmlGpmSupport_t;

typedef struct {
	unsigned metricId;
	nvmlReturn_t nvmlReturn;
	double value;
	struct {
		const char *shortName, *longName, *unit;
	} metricInfo;
} nvmlGpmMetric_t;

/* The array is as long as the caller's header says; only its first numMetrics entries are touched. */
typedef struct {
	unsigned version, numMetrics;
	nvmlGpmSample_t sample1, sample2;
	nvmlGpmMetric_t metrics[];
} nvmlGpmMetricsGet_t;

typedef struct {
	unsigned multiprocessorCount, sharedCopyEngineCount, sharedDecoderCount, sharedEncoderCount, sharedJpegCount,
		sharedOfaCount, gpuInstanceSliceCount, computeInstanceSliceCount;
	unsigned long long memorySizeMB;
} nvmlDeviceAttributes_t;

_Static_assert(sizeof(nvmlDeviceAttributes_t) == 40, "as the real one");
_Static_assert(sizeof(nvmlPciInfo_t) == 68, "as the real one");
_Static_assert(sizeof(nvmlMemory_v2_t) == 0x28, "as the real one");
_Static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "as the real one");
_Static_assert(sizeof(nvmlProcessUtilizationInfo_v1_t) == 40, "as the real one");
_Static_assert(sizeof(nvmlProcessesUtilizationInfo_v1_t) == 0x18, "as the real one");
_Static_assert(sizeof(nvmlProcessInfo_t) == 24, "as the real one");
_Static_assert(sizeof(nvmlFieldValue_t) == 40, "as the real one");
_Static_assert(sizeof(nvmlTemperature_v1_t) == 0xc, "as the real one");
_Static_assert(sizeof(nvmlEventData_t) == 32, "as the real one");
_Static_assert(sizeof(nvmlGpmMetric_t) == 40, "as the real one");
