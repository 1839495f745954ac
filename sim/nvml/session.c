/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "session.h"

#include <pthread.h>

#include "../query.h"

struct nvmlDevice_st {
	char unused; /* a handle is only ever an address */
};

static const uint32_t UNKNOWN = UINT32_MAX;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned initialised;
static int connection = -1;
static pid_t connected_as;
static bool unloaded; /* the server went away while NVML was initialised; only a new start helps, as on the real one */
static struct nvmlDevice_st handles[MAX_DEVICES];
static struct device_facts facts[MAX_DEVICES];
static unsigned device_count, gpu_count;
static uint32_t generation; /* of the facts, by the server's count */

static void disconnect(void)
{
	if (connection >= 0)
		close(connection);
	connection = -1;
}

static bool connected(void)
{
	if (connection >= 0 && connected_as == getpid())
		return true;
	disconnect(); /* a forked child must not share its parent's conversation */
	connection = query_connect_as(HELLO_NVML);
	connected_as = getpid();
	return connection >= 0;
}

static nvmlReturn_t from_errno(uint32_t status)
{
	switch (status) {
	case 0:
		return NVML_SUCCESS;
	case EINVAL:
		return NVML_ERROR_INVALID_ARGUMENT;
	case ENODEV:
		return NVML_ERROR_GPU_IS_LOST;
	case ENOENT:
		return NVML_ERROR_NOT_FOUND;
	default:
		return NVML_ERROR_UNKNOWN;
	}
}

static nvmlReturn_t ask_locked(const struct query *query, struct answer *answer, void **items)
{
	nvmlReturn_t result;

	if (unloaded || !connected() || !query_ask(connection, query, answer, items)) {
		disconnect();
		unloaded = true;
		return NVML_ERROR_DRIVER_NOT_LOADED;
	}
	result = from_errno(answer->status);
	if (result != NVML_SUCCESS) {
		free(*items);
		*items = NULL;
	}
	return result;
}

nvmlReturn_t session_ask(const struct query *query, struct answer *answer, void **items)
{
	nvmlReturn_t result;

	pthread_mutex_lock(&lock);
	result = ask_locked(query, answer, items);
	pthread_mutex_unlock(&lock);
	return result;
}

nvmlReturn_t session_ask_one(const struct query *query, void *item, size_t bytes)
{
	struct answer answer;
	void *items;
	bool fits;

	TRY(session_ask(query, &answer, &items));
	fits = answer.count == 1 && answer.item_bytes == bytes;
	if (fits)
		memcpy(item, items, bytes);
	free(items);
	return fits ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}

static nvmlReturn_t load_devices(void)
{
	struct query query = {.op = Q_DEVICES};
	struct answer answer;
	void *items;

	TRY(ask_locked(&query, &answer, &items));
	if (answer.count > MAX_DEVICES || (answer.count && answer.item_bytes != sizeof(*facts))) {
		free(items);
		return NVML_ERROR_UNKNOWN;
	}
	device_count = answer.count;
	if (items)
		memcpy(facts, items, device_count * sizeof(*facts));
	free(items);
	gpu_count = 0;
	while (gpu_count < device_count && !facts[gpu_count].is_instance)
		gpu_count++;
	return NVML_SUCCESS;
}

static nvmlReturn_t start_locked(void)
{
	nvmlReturn_t result = NVML_SUCCESS;

	if (!initialised) {
		unloaded = false;
		generation = UNKNOWN;
		disconnect();
		result = load_devices();
	}
	if (result == NVML_SUCCESS)
		initialised++;
	return result;
}

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
	nvmlReturn_t result;

	(void)flags; /* "no GPUs is fine" and "do not attach" change nothing here */
	pthread_mutex_lock(&lock);
	result = start_locked();
	pthread_mutex_unlock(&lock);
	return result;
}

EXPORT nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

EXPORT nvmlReturn_t nvmlShutdown(void)
{
	nvmlReturn_t result = NVML_ERROR_UNINITIALIZED;

	pthread_mutex_lock(&lock);
	if (initialised) {
		result = NVML_SUCCESS;
		if (--initialised == 0)
			disconnect();
	}
	pthread_mutex_unlock(&lock);
	return result;
}

static nvmlReturn_t check_switched_on(const char *function)
{
	struct query query = {.op = Q_UNSUPPORTED};
	struct answer answer;
	void *items;

	snprintf(query.name, sizeof(query.name), "%s", function);
	TRY(session_ask(&query, &answer, &items));
	free(items);
	return answer.count ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}

nvmlReturn_t session_enter(const char *function)
{
	bool ready;

	pthread_mutex_lock(&lock);
	ready = initialised > 0;
	pthread_mutex_unlock(&lock);
	return ready ? check_switched_on(function) : NVML_ERROR_UNINITIALIZED;
}

/* A GPU was split or joined: learn of it. An index never becomes another device. */
static nvmlReturn_t keep_up(uint32_t now)
{
	nvmlReturn_t result = NVML_SUCCESS;

	pthread_mutex_lock(&lock);
	if (now != generation)
		result = load_devices();
	if (result == NVML_SUCCESS)
		generation = now;
	pthread_mutex_unlock(&lock);
	return result;
}

nvmlReturn_t session_state(unsigned index, struct device_state *state)
{
	struct query query = {.op = Q_DEVICE_STATE, .device = index};

	TRY(session_ask_one(&query, state, sizeof(*state)));
	return keep_up(state->generation);
}

nvmlReturn_t session_enter_device(const char *function, nvmlDevice_t device, unsigned *index,
				  struct device_state *state)
{
	struct device_state present;

	TRY(session_enter(function));
	if (device < handles || device >= handles + device_count)
		return NVML_ERROR_INVALID_ARGUMENT;
	TRY(session_state((unsigned)(device - handles), &present));
	if (present.lost)
		return NVML_ERROR_GPU_IS_LOST;
	if (!facts[device - handles].present)
		return NVML_ERROR_NOT_FOUND;
	if (index)
		*index = (unsigned)(device - handles);
	if (state)
		*state = present;
	return NVML_SUCCESS;
}

nvmlReturn_t session_enter_gpu(const char *function, nvmlDevice_t device, unsigned *index, struct device_state *state)
{
	unsigned at;

	TRY(session_enter_device(function, device, &at, state));
	if (facts[at].is_instance)
		return NVML_ERROR_NOT_SUPPORTED;
	if (index)
		*index = at;
	return NVML_SUCCESS;
}

unsigned session_device_count(void)
{
	return gpu_count;
}

unsigned session_total_count(void)
{
	return device_count;
}

const struct device_facts *session_facts(unsigned index)
{
	return &facts[index];
}

nvmlDevice_t session_handle(unsigned index)
{
	return &handles[index];
}

nvmlReturn_t give(unsigned value, unsigned *to)
{
	if (!to)
		return NVML_ERROR_INVALID_ARGUMENT;
	*to = value;
	return NVML_SUCCESS;
}

nvmlReturn_t give_text(const char *text, char *buffer, unsigned length)
{
	if (!buffer)
		return NVML_ERROR_INVALID_ARGUMENT;
	if (strlen(text) >= length)
		return NVML_ERROR_INSUFFICIENT_SIZE;
	strcpy(buffer, text);
	return NVML_SUCCESS;
}
