/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Limits. Numbers are read as strtol and sscanf read them, as by the real program: what is no number is 0, and what
 * follows one is ignored. A limit of memory that cannot be read is 0, which lifts it.
 */
#include "state.h"

#include <ctype.h>

/* From 550 on, only root and the one who started the daemon may set defaults. */
static bool may_set_defaults(void)
{
	if (release() < 550 || privileged())
		return true;
	return say("Insufficient privileges for UID %u. Control deamon settings can only be modified by the user "
		   "started it or by the root user.",
		   geteuid());
}

static bool may_set_servers(void)
{
	if (release() < 550 || privileged())
		return true;
	return say("Insufficient privileges for UID %u. Only the root user may change settings for another user's "
		   "server.",
		   geteuid());
}

/* ---- percentages ---- */

static bool is_percentage(double value)
{
	return value > 0 && value <= 100;
}

static uint64_t thousandths(double percentage)
{
	uint64_t rounded = (uint64_t)(percentage * THOUSANDTHS + 0.5);

	return rounded ? rounded : 1;
}

void get_default_percentage(int server, const char *words)
{
	struct mps_status status;

	(void)words;
	if (get_status(server, &status))
		say("%.1f", (double)status.default_percentage / THOUSANDTHS);
}

void set_default_percentage(int server, const char *words)
{
	double value = strtod(words, NULL);

	if (!may_set_defaults())
		return;
	if (!is_percentage(value) || set(server, "default-percentage", 0, thousandths(value)))
		get_default_percentage(server, words);
}

void get_percentage(int server, const char *words)
{
	struct mps_status status;

	if (server_ready(server, (int)strtol(words, NULL, 10), &status))
		say("%.1f", (double)status.percentage / THOUSANDTHS);
}

void set_percentage(int server, const char *words)
{
	struct mps_status status;
	int pid = 0;
	double value = 0;

	sscanf(words, "%d %lf", &pid, &value);
	if (!server_ready(server, pid, &status) || !may_set_servers())
		return;
	if (!is_percentage(value) || set(server, "percentage", 0, thousandths(value)))
		get_percentage(server, words);
}

/* ---- memory ---- */

/* Whole GiB where it is at least one, rounded down; of no limit nothing is said. */
static void say_limit(uint64_t bytes)
{
	if (bytes >> 30)
		say("%luG", bytes >> 30);
	else if (bytes)
		say("%luM", bytes >> 20);
}

/* G is GiB; every other unit, and none, is MiB. */
static uint64_t read_limit(const char *text)
{
	char *end;
	uint64_t value = strtoull(text, &end, 10);

	return toupper((unsigned char)*end) == 'G' ? value << 30 : value << 20;
}

void get_default_memory(int server, const char *words)
{
	struct mps_status status;
	long device = strtol(words, NULL, 10);

	if (device >= 0 && device < MAX_DEVICES && get_status(server, &status))
		say_limit(status.default_memory[device]);
}

void set_default_memory(int server, const char *words)
{
	char *end;
	long device = strtol(words, &end, 10);

	if (may_set_defaults() && device >= 0 && device < MAX_DEVICES)
		set(server, "default-memory", (unsigned)device, read_limit(end));
}

static bool is_device(int server, int device)
{
	struct device_facts *facts;
	unsigned count;

	if (!get_devices(server, &facts, &count))
		return false;
	free(facts);
	return (device >= 0 && (unsigned)device < count) || say("Invalid device ordinal!");
}

void get_memory(int server, const char *words)
{
	struct mps_status status;
	int pid = 0, device = 0;

	sscanf(words, "%d %d", &pid, &device);
	if (server_ready(server, pid, &status) && is_device(server, device))
		say_limit(status.memory[device]);
}

void set_memory(int server, const char *words)
{
	struct mps_status status;
	int pid = 0, device = 0;
	char limit[64] = "";

	sscanf(words, "%d %d %63s", &pid, &device, limit);
	if (server_ready(server, pid, &status) && may_set_servers() && is_device(server, device))
		set(server, "memory", (unsigned)device, read_limit(limit));
}

/* ---- priority ---- */

void get_default_priority(int server, const char *words)
{
	struct mps_status status;

	(void)words;
	if (get_status(server, &status))
		say("%d", status.default_priority);
}

void set_default_priority(int server, const char *words)
{
	long priority = strtol(words, NULL, 10);

	if (!may_set_defaults())
		return;
	if (priority < 0 || priority > 1)
		say("Invalid priority value - must be 0 or 1!");
	else
		set(server, "default-priority", 0, (uint64_t)priority);
}
