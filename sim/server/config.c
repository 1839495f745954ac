/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "config.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../protocol.h"

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

static void set(struct config *config, const char *where, const char *key, const char *value)
{
	if (strcmp(key, "name") == 0)
		snprintf(config->name, sizeof(config->name), "%s", value);
	else if (strcmp(key, "mps") == 0 && strcmp(value, "on") == 0)
		config->mps = 1;
	else if (strcmp(key, "mps") == 0 && strcmp(value, "off") == 0)
		config->mps = 0;
	else if (strcmp(key, "gpus") == 0)
		config->gpus = (unsigned)number(where, key, value);
	else if (strcmp(key, "sms") == 0)
		config->sms = (unsigned)number(where, key, value);
	else if (strcmp(key, "memory") == 0)
		config->memory_bytes = number(where, key, value);
	else if (strcmp(key, "context_memory") == 0)
		config->context_bytes = number(where, key, value);
	else if (strcmp(key, "copy_bandwidth") == 0)
		config->copy_bytes_per_second = number(where, key, value);
	else if (strcmp(key, "dram_bandwidth") == 0)
		config->dram_bytes_per_second = number(where, key, value);
	else if (strcmp(key, "timeslice") == 0)
		config->timeslice_ns = number(where, key, value);
	else if (strcmp(key, "context_switch") == 0)
		config->switch_ns = number(where, key, value);
	else
		fail(where, key, value);
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

void config_load(struct config *config, const char *path)
{
	static const char *const KEYS[] = {
		"name",		  "mps",       "gpus",		"sms", "memory", "context_memory", "copy_bandwidth",
		"dram_bandwidth", "timeslice", "context_switch"};
	char variable[64];

	*config = (struct config){.gpus = 1,
				  .sms = 132,
				  .memory_bytes = 80ull << 30,
				  .context_bytes = 300ull << 20,
				  .copy_bytes_per_second = 25000000000ull,
				  .dram_bytes_per_second = 2000000000000ull,
				  .timeslice_ns = 2000000,
				  .switch_ns = 50000,
				  .name = "Simulated H200"};
	if (path)
		load_file(config, path);
	for (size_t i = 0; i < sizeof(KEYS) / sizeof(KEYS[0]); i++) {
		snprintf(variable, sizeof(variable), "GPUSIM_%s", KEYS[i]);
		for (char *c = variable; *c; c++)
			*c = (char)toupper((unsigned char)*c);
		if (getenv(variable))
			set(config, variable, KEYS[i], getenv(variable));
	}
	if (config->gpus < 1 || config->gpus > MAX_DEVICES || config->sms < 1 || config->sms > 1024 ||
	    !config->copy_bytes_per_second || !config->dram_bytes_per_second) {
		fprintf(stderr, "gpusim: need 1-%d gpus, 1-1024 sms and bandwidths above 0\n", MAX_DEVICES);
		exit(2);
	}
}
