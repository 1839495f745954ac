/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Which processes are on a device, and how much of its time they use. Process ids are those of the host. */
#include <stdbool.h>
#include <stdlib.h>

#include "session.h"

enum process_list {
	COMPUTE,
	MPS_COMPUTE,
	GRAPHICS, /* those that say so by GPUSIM_GRAPHICS */
};

static const unsigned SPARE_SAMPLES = 16; /* a caller asks for the size first; more may come before it asks again */

static bool belongs(const struct process_entry *process, enum process_list list)
{
	if (list == GRAPHICS)
		return process->graphics != GRAPHICS_NONE;
	/* an MPS client is in both lists, its server in the first one */
	return process->graphics != GRAPHICS_ONLY && (list == COMPUTE || process->mps);
}

static nvmlProcessInfo_t describe(const struct process_entry *process)
{
	const struct device_facts *facts = session_facts(process->device);

	return (nvmlProcessInfo_t){process->pid, process->used_bytes,
				   facts->is_instance ? facts->gpu_instance : NVML_NO_INSTANCE,
				   facts->is_instance ? facts->compute_instance : NVML_NO_INSTANCE};
}

static nvmlReturn_t list_processes(unsigned index, enum process_list list, unsigned *count, nvmlProcessInfo_t *to)
{
	struct query query = {.op = Q_PROCESSES, .device = index};
	struct answer answer;
	struct process_entry *processes;
	void *items;
	unsigned room = *count;

	TRY(session_ask(&query, &answer, &items));
	processes = items;
	*count = 0;
	for (unsigned at = 0; at < answer.count; at++) {
		if (!belongs(&processes[at], list))
			continue;
		if (to && *count < room)
			to[*count] = describe(&processes[at]);
		++*count;
	}
	free(items);
	return *count > room || (*count && !to) ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t running(const char *function, nvmlDevice_t device, enum process_list list, unsigned *count,
			    nvmlProcessInfo_t *to)
{
	unsigned index;

	TRY(session_enter_device(function, device, &index, NULL));
	if (!count || (*count && !to))
		return NVML_ERROR_INVALID_ARGUMENT;
	return list_processes(index, list, count, to);
}

/* The oldest version of these calls has entries without the instance ids. */
static nvmlReturn_t running_v1(const char *function, nvmlDevice_t device, enum process_list list, unsigned *count,
			       nvmlProcessInfo_v1_t *to)
{
	nvmlProcessInfo_t *wide = to && count ? calloc(*count, sizeof(*wide)) : NULL;
	nvmlReturn_t result;

	if (to && count && *count && !wide)
		return NVML_ERROR_MEMORY;
	result = running(function, device, list, count, wide);
	for (unsigned at = 0; result == NVML_SUCCESS && wide && at < *count; at++)
		to[at] = (nvmlProcessInfo_v1_t){wide[at].pid, wide[at].usedGpuMemory};
	free(wide);
	return result;
}

#define RUNNING_PROCESSES(NAME, list)                                                                                  \
	EXPORT nvmlReturn_t NAME(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *to)                       \
	{                                                                                                              \
		return running_v1(#NAME, device, list, count, to);                                                     \
	}                                                                                                              \
	EXPORT nvmlReturn_t NAME##_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *to)                     \
	{                                                                                                              \
		return running(#NAME "_v2", device, list, count, to);                                                  \
	}                                                                                                              \
	EXPORT nvmlReturn_t NAME##_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *to)                     \
	{                                                                                                              \
		return running(#NAME "_v3", device, list, count, to);                                                  \
	}

RUNNING_PROCESSES(nvmlDeviceGetComputeRunningProcesses, COMPUTE)
RUNNING_PROCESSES(nvmlDeviceGetGraphicsRunningProcesses, GRAPHICS)
RUNNING_PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses, MPS_COMPUTE)

/* One entry for each process, the mean over all samples since then: those that credit it with nothing count, too. */
static unsigned merge(struct util_sample *samples, unsigned count, uint64_t newest_us, unsigned looks)
{
	unsigned merged = 0;

	for (unsigned at = 0; at < count; at++) {
		struct util_sample one = samples[at];
		unsigned same = 0;

		while (same < merged && samples[same].pid != one.pid)
			same++;
		if (same == merged)
			samples[merged++] = (struct util_sample){newest_us, one.pid, 0};
		samples[same].percent += one.percent;
	}
	for (unsigned at = 0; at < merged; at++) {
		unsigned mean = (samples[at].percent + looks / 2) / looks;

		samples[at].percent = mean ? mean : 1;
	}
	return merged;
}

static nvmlReturn_t utilization(unsigned index, uint64_t since_us, struct util_sample **samples, unsigned *count)
{
	struct query query = {.op = Q_PROCESS_SAMPLES, .device = index, .a = since_us};
	struct util_sample *looks;
	struct answer answer;
	void *items;

	if (session_facts(index)->mig_mode)
		return NVML_ERROR_NOT_SUPPORTED;
	TRY(session_ask(&query, &answer, &items));
	*samples = items;
	*count = answer.count;
	if (!answer.count)
		return NVML_ERROR_NOT_FOUND;
	query.op = Q_DEVICE_SAMPLES;
	TRY(session_ask(&query, &answer, &items));
	looks = items;
	*count = merge(*samples, *count, looks[answer.count - 1].at_us, answer.count);
	free(looks);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *to,
						    unsigned *count, unsigned long long since_us)
{
	struct util_sample *samples;
	struct device_state state;
	unsigned index, have, room;

	ENTER_GPU(device, &index, &state);
	if (!count)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (!state.old_process_utilization)
		return NVML_ERROR_NOT_FOUND; /* as the real one on Blackwell, however busy it is */
	TRY(utilization(index, since_us, &samples, &have));
	room = to ? *count : 0;
	for (unsigned at = 0; have <= room && at < have; at++)
		to[at] = (nvmlProcessUtilizationSample_t){
			.pid = samples[at].pid, .timeStamp = samples[at].at_us, .smUtil = samples[at].percent};
	*count = have <= room ? have : have + SPARE_SAMPLES;
	free(samples);
	return have <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

EXPORT nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *info)
{
	struct util_sample *samples;
	unsigned index, have, room;

	ENTER_GPU(device, &index, NULL);
	if (!info)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (info->version != NVML_STRUCT_VERSION(*info, 1))
		return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
	TRY(utilization(index, info->lastSeenTimeStamp, &samples, &have));
	room = info->procUtilArray ? info->processSamplesCount : 0;
	for (unsigned at = 0; have <= room && at < have; at++)
		info->procUtilArray[at] = (nvmlProcessUtilizationInfo_v1_t){
			.timeStamp = samples[at].at_us, .pid = samples[at].pid, .smUtil = samples[at].percent};
	info->processSamplesCount = have <= room ? have : have + SPARE_SAMPLES;
	free(samples);
	return have <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}
