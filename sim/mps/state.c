/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "state.h"

#include <stdarg.h>
#include <sys/stat.h>

#include "pipes.h"

bool say(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	putchar('\n');
	return false;
}

int release(void)
{
	const char *wanted = getenv("GPUSIM_MPS_VERSION");
	const int known[] = {535, 550, 555, 580};

	for (size_t at = 0; at < sizeof(known) / sizeof(*known); at++)
		if (!wanted || !*wanted || atoi(wanted) == known[at])
			return wanted && *wanted ? known[at] : 580;
	return 0;
}

bool privileged(void)
{
	char path[4096];
	struct stat found;

	pipe_path(path, sizeof(path), PIPE_NAME);
	return geteuid() == 0 || (stat(path, &found) == 0 && found.st_uid == geteuid());
}

bool ask(int server, struct query *query, void **items, unsigned *count)
{
	struct answer answer;

	if (!query_ask(server, query, &answer, items))
		return say("Connection to the GPU lost");
	*count = answer.count;
	if (answer.status == 0)
		return true;
	free(*items);
	*items = NULL;
	return say("Failed: %s", strerror((int)answer.status));
}

bool get_status(int server, struct mps_status *status)
{
	struct query query = {.op = Q_MPS_STATUS};
	unsigned count;
	void *items;

	if (!ask(server, &query, &items, &count))
		return false;
	if (count == 1)
		memcpy(status, items, sizeof(*status));
	free(items);
	return count == 1 || say("Connection to the GPU lost");
}

bool get_clients(int server, struct mps_client **clients, unsigned *count)
{
	struct query query = {.op = Q_MPS_CLIENTS};
	void *items;

	if (!ask(server, &query, &items, count))
		return false;
	*clients = items;
	return true;
}

bool get_devices(int server, struct device_facts **facts, unsigned *count)
{
	struct query query = {.op = Q_DEVICES};
	void *items;

	if (!ask(server, &query, &items, count))
		return false;
	*facts = items;
	return true;
}

bool set(int server, const char *what, unsigned device, uint64_t value)
{
	struct query query = {.op = Q_MPS_SET, .a = value, .b = device};
	unsigned count;
	void *items;

	snprintf(query.text, sizeof(query.text), "%s", what);
	if (!ask(server, &query, &items, &count))
		return false;
	free(items);
	return true;
}

bool is_ready(const struct mps_status *status)
{
	const char *held = getenv("GPUSIM_MPS_STARTING");

	return status->ready && !(held && *held);
}

bool server_ready(int server, int pid, struct mps_status *status)
{
	if (!get_status(server, status))
		return false;
	if (!status->started || pid != (int)status->server_pid)
		return say("Server %d not found", pid);
	return is_ready(status);
}
