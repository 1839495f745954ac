/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The shape of the simulated node. */
#pragma once
#include <stdint.h>

struct config {
	unsigned gpus, sms;
	uint64_t memory_bytes, context_bytes;
	uint64_t copy_bytes_per_second, dram_bytes_per_second;
	uint64_t timeslice_ns, switch_ns;
	int mps;
	char name[64];
};

/* Defaults, then the file (may be NULL), then GPUSIM_* of the environment. Exits with a line that names a mistake. */
void config_load(struct config *config, const char *path);
