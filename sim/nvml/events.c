/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* XID events. A set hears of what happens after its first registration, one event per wait. */
#include <errno.h>
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "session.h"

struct nvmlEventSet_st {
	bool registered[MAX_DEVICES];
	bool any;
	uint64_t after; /* the last event that was delivered, or came before the set was in use */
};

static const long POLL_NS = 10000000;
static const unsigned FOREVER_MS = 0xffffffff;

EXPORT nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
	TRY(session_enter(__func__));
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	*set = calloc(1, sizeof(**set));
	return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

EXPORT nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	free(set);
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
	ENTER_GPU(device, NULL, NULL);
	if (!types)
		return NVML_ERROR_INVALID_ARGUMENT;
	*types = NVML_EVENT_TYPE_XID_CRITICAL_ERROR;
	return NVML_SUCCESS;
}

static nvmlReturn_t events_after(uint64_t after, struct xid_event **events, unsigned *count)
{
	struct query query = {.op = Q_XIDS, .a = after};
	struct answer answer;
	void *items;

	TRY(session_ask(&query, &answer, &items));
	*events = items;
	*count = answer.count;
	return NVML_SUCCESS;
}

static nvmlReturn_t skip_past(nvmlEventSet_t set)
{
	struct xid_event *events;
	unsigned count;

	TRY(events_after(0, &events, &count));
	for (unsigned at = 0; at < count; at++)
		if (events[at].sequence > set->after)
			set->after = events[at].sequence;
	free(events);
	set->any = true;
	return NVML_SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
	unsigned index;

	ENTER_GPU(device, &index, NULL);
	if (!set)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (types & ~(unsigned long long)NVML_EVENT_TYPE_XID_CRITICAL_ERROR)
		return NVML_ERROR_NOT_SUPPORTED;
	if (!set->any)
		TRY(skip_past(set));
	set->registered[index] = types != 0;
	return NVML_SUCCESS;
}

/* An instance's event comes from its GPU, and says which instance it was. */
static bool is_for(nvmlEventSet_t set, const struct xid_event *event, nvmlEventData_t *data)
{
	const struct device_facts *facts;

	if (event->device >= session_total_count())
		return false;
	facts = session_facts(event->device);
	if (!set->registered[facts->gpu])
		return false;
	*data = (nvmlEventData_t){session_handle(facts->gpu), NVML_EVENT_TYPE_XID_CRITICAL_ERROR, event->xid,
				  facts->is_instance ? facts->gpu_instance : NVML_NO_INSTANCE,
				  facts->is_instance ? facts->compute_instance : NVML_NO_INSTANCE};
	return true;
}

/* NOT_FOUND: nothing new. */
static nvmlReturn_t next_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
	struct xid_event *events;
	unsigned count;
	nvmlReturn_t result = NVML_ERROR_NOT_FOUND;

	TRY(events_after(set->after, &events, &count));
	for (unsigned at = 0; at < count && result != NVML_SUCCESS; at++) {
		set->after = events[at].sequence;
		if (is_for(set, &events[at], data))
			result = NVML_SUCCESS;
	}
	free(events);
	return result;
}

static uint64_t now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

EXPORT nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
	uint64_t deadline_ms = now_ms() + timeout_ms;
	nvmlReturn_t result;

	TRY(session_enter(__func__));
	if (!set || !data)
		return NVML_ERROR_INVALID_ARGUMENT;
	while ((result = next_event(set, data)) == NVML_ERROR_NOT_FOUND) {
		struct timespec pause = {.tv_nsec = POLL_NS};

		if (timeout_ms != FOREVER_MS && now_ms() >= deadline_ms)
			return NVML_ERROR_TIMEOUT;
		nanosleep(&pause, NULL);
	}
	return result;
}

EXPORT nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
	return nvmlEventSetWait_v2(set, data, timeout_ms);
}
