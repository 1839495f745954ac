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

struct span {
	uint64_t elapsed_ns, at_us;
	uint64_t alone_ns[MAX_DEVICES]; /* busy with processes that are no MPS clients */
	bool mps[MAX_DEVICES]; /* MPS clients were busy */
};

static uint32_t percent_of(const struct span *span, uint64_t busy_ns)
{
	uint32_t percent = (uint32_t)((busy_ns * 100 + span->elapsed_ns / 2) / span->elapsed_ns);

	return percent ? percent : 1;
}

static void keep_process(struct node *node, const struct span *span, unsigned device, uint32_t pid, uint64_t busy_ns)
{
	keep(&node->process_samples[device], span->at_us, pid, percent_of(span, busy_ns));
}

static uint64_t take_busy_ns(struct node *node, struct record *record)
{
	uint64_t before = record->sampled_busy_ns;

	record->sampled_busy_ns = record_read(node->model, record)->truth.busy_ns;
	return record->sampled_busy_ns - before;
}

static uint64_t below(struct node *node, uint64_t limit)
{
	node->random ^= node->random << 13;
	node->random ^= node->random >> 7;
	node->random ^= node->random << 17;
	return node->random % limit;
}

/*
 * Those that take turns: a sample credits one of them with all that the device did, as often as it has the device. The
 * MPS clients are one of them, by their server, unless each is credited by itself.
 */
struct poll {
	uint64_t busy_ns[MAX_DEVICES];
	uint32_t pid[MAX_DEVICES];
};

static void poll_add(struct node *node, struct poll *poll, unsigned device, uint32_t pid, uint64_t busy_ns)
{
	poll->busy_ns[device] += busy_ns;
	if (busy_ns && below(node, poll->busy_ns[device]) < busy_ns)
		poll->pid[device] = pid;
}

static void sample_processes(struct node *node, struct span *span, struct poll *poll)
{
	size_t count;
	struct record **all = records(node->model, &count);

	for (size_t i = 0; i < count; i++) {
		uint64_t busy = take_busy_ns(node, all[i]);
		const struct truth_entry *truth = &all[i]->truth;

		if (!truth->mps) {
			span->alone_ns[truth->device] += busy;
			if (truth->alive)
				poll_add(node, poll, truth->device, truth->pid, busy);
		} else if (busy) {
			span->mps[truth->device] = true;
			if (truth->alive && !node->config.mps_credits_server)
				keep_process(node, span, truth->device, truth->pid, busy);
		}
	}
}

/* Contexts that do not share take turns: what is left of the device's busy time is the MPS clients'. */
static void sample_mps_server(struct node *node, const struct span *span, struct poll *poll, unsigned device,
			      uint64_t busy_ns)
{
	if (node->config.mps_credits_server && span->mps[device] && busy_ns > span->alone_ns[device])
		poll_add(node, poll, device, mps_server_pid(node), busy_ns - span->alone_ns[device]);
}

/* NVML's utilisation is a share of time: the part since the last sample in which any of the process's kernels ran. */
void samples_take(struct node *node, uint64_t now_ns)
{
	struct span span = {.elapsed_ns = now_ns - node->sampled_ns, .at_us = wall_us()};
	struct poll poll = {0};
	struct device_state state;

	if (!span.elapsed_ns)
		return;
	sample_processes(node, &span, &poll);
	for (unsigned d = 0; d < device_count(node->model); d++) {
		uint64_t busy;

		device_state_of(node, d, &state);
		busy = state.busy_ns - node->device_sampled_busy_ns[d];
		node->device_sampled_busy_ns[d] = state.busy_ns;
		node->load[d] = (double)busy / (double)span.elapsed_ns;
		if (node->drop_samples)
			continue;
		keep(&node->device_samples[d], span.at_us, 0, (uint32_t)(node->load[d] * 100 + 0.5));
		sample_mps_server(node, &span, &poll, d, busy);
		if (poll.pid[d])
			keep_process(node, &span, d, poll.pid[d], poll.busy_ns[d]);
	}
	if (node->drop_samples)
		node->drop_samples--;
	node->sampled_ns = now_ns;
}

void samples_forget(struct node *node)
{
	for (unsigned d = 0; d < MAX_DEVICES; d++)
		node->process_samples[d].count = node->device_samples[d].count = 0;
}
