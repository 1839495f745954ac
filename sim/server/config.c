/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "config.h"

#include <ctype.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const char *where, const char *key, const char *value)
{
	fprintf(stderr, "gpusim: %s: '%s = %s' is not understood; see sim/README.md for keys and units\n", where, key,
		value);
	exit(2);
}

struct unit {
	const char *suffix;
	double factor;
};

static const struct unit UNITS[] = {
	{"KiB", 1024.0},
	{"MiB", 1048576.0},
	{"GiB", 1073741824.0},
	{"TiB", 1099511627776.0},
	{"GB/s", 1e9},
	{"TB/s", 1e12},
	{"MB/s", 1e6},
	{"ns", 1.0},
	{"us", 1e3},
	{"ms", 1e6},
	{"s", 1e9},
	{"", 1.0},
};

static uint64_t number(const char *where, const char *key, const char *value)
{
	char *end;
	double amount = strtod(value, &end);

	if (end != value && amount >= 0)
		for (size_t i = 0; i < sizeof(UNITS) / sizeof(UNITS[0]); i++)
			if (strcmp(end, UNITS[i].suffix) == 0)
				return (uint64_t)(amount * UNITS[i].factor);
	fail(where, key, value);
	return 0;
}

static int either(const char *where, const char *key, const char *value, const char *yes, const char *no)
{
	if (strcmp(value, yes) && strcmp(value, no))
		fail(where, key, value);
	return strcmp(value, yes) == 0;
}

/* "132" for all, or "132,66": each GPU's own. */
static void set_sms(struct config *config, const char *where, const char *value)
{
	char copy[256], *place = NULL, *part;
	unsigned gpu = 0;

	snprintf(copy, sizeof(copy), "%s", value);
	memset(config->gpu_sms, 0, sizeof(config->gpu_sms));
	part = strtok_r(copy, ", ", &place);
	config->sms = (unsigned)number(where, "sms", part ? part : value);
	for (; part; part = strtok_r(NULL, ", ", &place)) {
		if (gpu == MAX_GPUS)
			fail(where, "sms", value);
		config->gpu_sms[gpu++] = (unsigned)number(where, "sms", part);
	}
	if (gpu == 1)
		config->gpu_sms[0] = 0;
}

/* "0:3g.40gb,2g.20gb;1:7g.80gb"; whether it fits is looked at when the memory is known. */
static void set_mig(struct config *config, const char *where, const char *value)
{
	char copy[256], *place = NULL, *end;

	snprintf(copy, sizeof(copy), "%s", value);
	for (char *part = strtok_r(copy, "; ", &place); part; part = strtok_r(NULL, "; ", &place)) {
		unsigned long gpu = strtoul(part, &end, 10);

		if (end == part || *end != ':' || gpu >= MAX_GPUS || !mig_parse(end + 1, UINT64_MAX, config->mig[gpu]))
			fail(where, "mig", value);
		config->mig_mode[gpu] = 1;
	}
}

/* Keys that are a number with a unit, and what they are by default. */
static const struct {
	const char *key;
	size_t at;
	uint64_t value;
} NUMBERS[] = {
	{"memory", offsetof(struct config, memory_bytes), 80ull << 30},
	{"context_memory", offsetof(struct config, context_bytes), 520ull << 20},
	{"copy_bandwidth", offsetof(struct config, copy_bytes_per_second), 55000000000ull},
	{"copies_at_once", offsetof(struct config, copies_at_once), 0},
	{"dram_bandwidth", offsetof(struct config, dram_bytes_per_second), 2000000000000ull},
	{"save_time", offsetof(struct config, save_ns), 290000000},
	{"save_bandwidth", offsetof(struct config, save_bytes_per_second), 2500000000ull},
	{"restore_time", offsetof(struct config, restore_ns), 180000000},
	{"restore_bandwidth", offsetof(struct config, restore_bytes_per_second), 4000000000ull},
	{"timeslice", offsetof(struct config, timeslice_ns), 2150000},
	{"context_switch", offsetof(struct config, switch_ns), 200000},
	{"launch_cost", offsetof(struct config, launch_ns), 3000},
	{"mps_start", offsetof(struct config, mps_start_ns), 170000000},
};

enum { NUMBER_COUNT = sizeof(NUMBERS) / sizeof(NUMBERS[0]) };

static uint64_t *number_at(struct config *config, size_t i)
{
	return (uint64_t *)((char *)config + NUMBERS[i].at);
}

static uint64_t *number_of(struct config *config, const char *key)
{
	for (size_t i = 0; i < NUMBER_COUNT; i++)
		if (strcmp(key, NUMBERS[i].key) == 0)
			return number_at(config, i);
	return NULL;
}

static void set(struct config *config, const char *where, const char *key, const char *value)
{
	if (strcmp(key, "name") == 0)
		snprintf(config->name, sizeof(config->name), "%s", value);
	else if (strcmp(key, "mps") == 0)
		config->mps = either(where, key, value, "on", "off");
	else if (strcmp(key, "mps_priority") == 0)
		config->mps_priority = either(where, key, value, "on", "off");
	else if (strcmp(key, "mps_credits") == 0)
		config->mps_credits_server = either(where, key, value, "server", "client");
	else if (strcmp(key, "old_process_utilization") == 0)
		config->old_process_utilization_off = either(where, key, value, "off", "on");
	else if (strcmp(key, "mig") == 0)
		set_mig(config, where, value);
	else if (strcmp(key, "gpus") == 0)
		config->gpus = (unsigned)number(where, key, value);
	else if (strcmp(key, "sms") == 0)
		set_sms(config, where, value);
	else if (number_of(config, key))
		*number_of(config, key) = number(where, key, value);
	else
		fail(where, key, value);
}

/* ---- MIG ---- */

/* How many of a Hopper's 132 SMs so many of its slices have. */
static const struct {
	unsigned slices, sms;
} MIG_SIZES[] = {{1, 16}, {2, 32}, {3, 60}, {4, 64}, {7, 132}};

unsigned mig_sms(unsigned slices, unsigned gpu_sms)
{
	unsigned sms = 0;

	for (size_t i = 0; i < sizeof(MIG_SIZES) / sizeof(MIG_SIZES[0]); i++)
		if (MIG_SIZES[i].slices == slices)
			sms = MIG_SIZES[i].sms * gpu_sms / 132;
	return sms;
}

bool mig_parse(const char *text, uint64_t memory_bytes, struct mig_profile profiles[MAX_INSTANCES])
{
	unsigned slices = 0, gigabytes = 0, count = 0;

	memset(profiles, 0, MAX_INSTANCES * sizeof(*profiles));
	while (*text) {
		struct mig_profile *profile = &profiles[count];
		int length = 0;

		if (count == MAX_INSTANCES ||
		    sscanf(text, "%1ug.%4ugb%n", &profile->slices, &profile->gigabytes, &length) != 2 || !length ||
		    !mig_sms(profile->slices, 132) || !profile->gigabytes)
			return false;
		slices += profile->slices;
		gigabytes += profile->gigabytes;
		text += length;
		if (*text && (*text++ != ',' || !*text))
			return false;
		count++;
	}
	return slices <= 7 && (uint64_t)gigabytes <= memory_bytes >> 30;
}

static bool mig_fits(const struct config *config)
{
	unsigned instances = 0;

	for (unsigned gpu = 0; gpu < MAX_GPUS; gpu++) {
		uint64_t gigabytes = 0;

		if (config->mig_mode[gpu] && gpu >= config->gpus)
			return false;
		for (unsigned i = 0; i < MAX_INSTANCES; i++) {
			gigabytes += config->mig[gpu][i].gigabytes;
			instances += config->mig[gpu][i].slices > 0;
		}
		if (gigabytes > config->memory_bytes >> 30)
			return false;
	}
	return config->gpus + instances <= MAX_DEVICES;
}

static char *trim(char *text)
{
	size_t length;

	while (isspace((unsigned char)*text))
		text++;
	length = strlen(text);
	while (length && isspace((unsigned char)text[length - 1]))
		text[--length] = 0;
	return text;
}

static void load_file(struct config *config, const char *path)
{
	char line[256], *equals, *comment;
	FILE *file = fopen(path, "r");

	if (!file) {
		fprintf(stderr, "gpusim: cannot read %s\n", path);
		exit(2);
	}
	while (fgets(line, sizeof(line), file)) {
		comment = strchr(line, '#');
		if (comment)
			*comment = 0;
		if (!*trim(line))
			continue;
		equals = strchr(line, '=');
		if (!equals)
			fail(path, trim(line), "");
		*equals = 0;
		set(config, path, trim(line), trim(equals + 1));
	}
	fclose(file);
}

static bool sms_fit(const struct config *config)
{
	for (unsigned gpu = 0; gpu < MAX_GPUS; gpu++)
		if (config->gpu_sms[gpu] > 1024)
			return false;
	return config->sms >= 1 && config->sms <= 1024;
}

static void set_from_environment(struct config *config, const char *key)
{
	char variable[64];

	snprintf(variable, sizeof(variable), "GPUSIM_%s", key);
	for (char *c = variable; *c; c++)
		*c = (char)toupper((unsigned char)*c);
	if (getenv(variable))
		set(config, variable, key, getenv(variable));
}

void config_load(struct config *config, const char *path)
{
	static const char *const OTHERS[] = {"name", "mps",  "mps_priority", "mps_credits", "old_process_utilization",
					     "mig",  "gpus", "sms"};

	*config = (struct config){.gpus = 1, .sms = 132, .mps_credits_server = 1, .name = "Simulated H200"};
	for (size_t i = 0; i < NUMBER_COUNT; i++)
		*number_at(config, i) = NUMBERS[i].value;
	if (path)
		load_file(config, path);
	for (size_t i = 0; i < sizeof(OTHERS) / sizeof(OTHERS[0]); i++)
		set_from_environment(config, OTHERS[i]);
	for (size_t i = 0; i < NUMBER_COUNT; i++)
		set_from_environment(config, NUMBERS[i].key);
	if (config->gpus < 1 || config->gpus > MAX_GPUS || !sms_fit(config) || !config->copy_bytes_per_second ||
	    !config->dram_bytes_per_second || !config->save_bytes_per_second || !config->restore_bytes_per_second ||
	    !config->timeslice_ns) {
		fprintf(stderr, "gpusim: need 1-%d gpus, 1-1024 sms, bandwidths and a timeslice above 0\n", MAX_GPUS);
		exit(2);
	}
	if (!mig_fits(config)) {
		fprintf(stderr,
			"gpusim: the MIG instances need a GPU that is there, 7 slices and its memory at most, and %d "
			"devices in all\n",
			MAX_DEVICES);
		exit(2);
	}
}
