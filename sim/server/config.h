/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The shape of the simulated node. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

#include "../protocol.h"

struct mig_profile {
	unsigned slices, gigabytes;
};

struct config {
	unsigned gpus, sms;
	uint64_t memory_bytes, context_bytes;
	uint64_t copy_bytes_per_second, dram_bytes_per_second;
	uint64_t save_ns, save_bytes_per_second, restore_ns, restore_bytes_per_second; /* of other processes */
	uint64_t copies_at_once; /* in one direction of a link; 0: all share it */
	uint64_t timeslice_ns, switch_ns, launch_ns, mps_start_ns;
	int mps, mps_priority, mps_credits_server, old_process_utilization_off;
	unsigned gpu_sms[MAX_GPUS]; /* 0: as `sms` says */
	int mig_mode[MAX_GPUS];
	struct mig_profile mig[MAX_GPUS][MAX_INSTANCES];
	char name[64];
};

/* "3g.40gb,2g.20gb" → profiles, an unused one has 0 slices. False for what does not fit on a GPU of that memory. */
bool mig_parse(const char *text, uint64_t memory_bytes, struct mig_profile profiles[MAX_INSTANCES]);
/* SMs of an instance on a GPU of so many. */
unsigned mig_sms(unsigned slices, unsigned gpu_sms);

/* Defaults, then the file (may be NULL), then GPUSIM_* of the environment. Exits with a line that names a mistake. */
void config_load(struct config *config, const char *path);
