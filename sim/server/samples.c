/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include <time.h>

#include "server.h"

static uint64_t wall_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

static void keep(struct samples *samples, uint64_t at_us, uint32_t pid, uint32_t percent)
{
	samples->ring[samples->count++ % SAMPLES] = (struct util_sample){at_us, pid, percent};
}

/* NVML's utilisation is a share of time: the part of the second in which any of the process's kernels ran. */
void samples_take(struct node *node, uint64_t now_ns)
{
	uint64_t elapsed = now_ns - node->sampled_ns, at_us = wall_us();
	size_t count;
	struct record **all = records(node->model, &count);
	struct device_state state;

	if (!elapsed)
		return;
	for (size_t i = 0; i < count; i++) {
		const struct record *record = record_read(node->model, all[i]);
		uint64_t busy = record->truth.busy_ns - record->sampled_busy_ns;
		uint32_t percent = (uint32_t)((busy * 100 + elapsed / 2) / elapsed);

		all[i]->sampled_busy_ns = record->truth.busy_ns;
		if (!busy || !record->truth.alive)
			continue;
		if (node->drop_samples)
			node->drop_samples--;
		else
			keep(&node->process_samples[record->truth.device], at_us, record->truth.pid,
			     percent ? percent : 1);
	}
	for (unsigned d = 0; d < node->config.gpus; d++) {
		uint64_t busy;

		device_read(node->model, d, &state);
		busy = state.busy_ns - node->device_sampled_busy_ns[d];
		node->device_sampled_busy_ns[d] = state.busy_ns;
		node->load[d] = (double)busy / (double)elapsed;
		keep(&node->device_samples[d], at_us, 0, (uint32_t)(node->load[d] * 100 + 0.5));
	}
	node->sampled_ns = now_ns;
}
