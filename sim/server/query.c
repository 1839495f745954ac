/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "server.h"

#define IDLE_MW 75000u
#define LIMIT_MW 700000u
#define IDLE_MHZ 345u
#define BUSY_MHZ 1980u
#define RESERVED_BYTES (600ull << 20)

static void put(struct client *client, const void *data, size_t bytes)
{
	client->output = realloc(client->output, client->output_length + bytes + 1);
	if (!client->output)
		abort();
	if (bytes)
		memcpy(client->output + client->output_length, data, bytes);
	client->output_length += bytes;
}

void query_reply(struct client *client, uint32_t status, const void *items, size_t count, size_t item_bytes)
{
	struct answer answer = {.status = status, .count = (uint32_t)count, .item_bytes = (uint32_t)item_bytes};

	put(client, &answer, sizeof(answer));
	put(client, items, count * item_bytes);
}

/* A GPU in MIG mode shows the sum of its instances. */
void device_state_of(const struct node *node, unsigned device, struct device_state *state)
{
	*state = (struct device_state){0};
	device_read(node->model, device, state);
	if (!node->facts[device].is_instance)
		mig_sum(node, device, state);
}

static void device_state(const struct node *node, struct client *client, uint32_t device)
{
	struct device_state state;
	struct timespec now;
	double load = node->load[device];

	device_state_of(node, device, &state);
	clock_gettime(CLOCK_REALTIME, &now);
	state.wall_us = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
	state.memory_reserved = RESERVED_BYTES < node->facts[device].memory_bytes / 8 ? RESERVED_BYTES : 0;
	state.sm_clock_mhz = load > 0 ? BUSY_MHZ : IDLE_MHZ;
	state.power_mw = IDLE_MW + (uint32_t)(load * (LIMIT_MW - IDLE_MW) * 0.85);
	state.power_limit_mw = LIMIT_MW;
	state.temperature_c = 34 + (uint32_t)(load * 38);
	state.lost = node->lost[node->facts[device].gpu];
	state.mps = node->mps.running;
	state.generation = node->generation;
	state.old_process_utilization = !node->config.old_process_utilization_off;
	query_reply(client, 0, &state, 1, sizeof(state));
}

struct process_list {
	struct process_entry *entries;
	size_t count;
};

static void list(struct process_list *all, struct process_entry entry)
{
	all->entries = realloc(all->entries, (all->count + 1) * sizeof(entry));
	if (!all->entries)
		abort();
	all->entries[all->count++] = entry;
}

static void list_device(const struct node *node, struct process_list *all, uint32_t device)
{
	bool shared = false;

	for (struct client *other = node->clients; other; other = other->next) {
		if (!other->contexts[device] || other->swapped)
			continue;
		shared |= other->mps;
		list(all, (struct process_entry){.pid = other->pid,
						 .mps = other->mps,
						 .graphics = other->hello.graphics,
						 .device = device,
						 .used_bytes = other->records[device]->truth.memory_bytes});
	}
	if (shared)
		list(all, (struct process_entry){.pid = mps_server_pid(node), .device = device});
}

/* Of a GPU in MIG mode: those on its instances. */
static void processes(const struct node *node, struct client *client, uint32_t device)
{
	struct process_list all = {0};

	list_device(node, &all, device);
	for (uint32_t d = node->config.gpus; d < device_count(node->model) && device < node->config.gpus; d++)
		if (node->facts[d].gpu == device)
			list_device(node, &all, d);
	query_reply(client, 0, all.entries, all.count, sizeof(*all.entries));
	free(all.entries);
}

static void sample_list(struct client *client, const struct samples *samples, uint64_t since_us)
{
	uint64_t first = samples->count > SAMPLES ? samples->count - SAMPLES : 0, i = samples->count;

	while (i > first && samples->ring[(i - 1) % SAMPLES].at_us > since_us)
		i--;
	query_reply(client, 0, NULL, 0, 0);
	client->output_length -= sizeof(struct answer);
	put(client, &(struct answer){.count = (uint32_t)(samples->count - i), .item_bytes = sizeof(struct util_sample)},
	    sizeof(struct answer));
	for (; i < samples->count; i++)
		put(client, &samples->ring[i % SAMPLES], sizeof(struct util_sample));
}

static void xid_list(const struct node *node, struct client *client, uint64_t after)
{
	struct xid_event found[XIDS];
	size_t count = 0;

	for (uint64_t i = node->xid_count > XIDS ? node->xid_count - XIDS : 0; i < node->xid_count; i++)
		if (node->xids[i % XIDS].sequence > after)
			found[count++] = node->xids[i % XIDS];
	query_reply(client, 0, found, count, sizeof(*found));
}

static void truth(const struct node *node, struct client *client)
{
	size_t count;
	struct record **all = records(node->model, &count);

	put(client, &(struct answer){.count = (uint32_t)count, .item_bytes = sizeof(struct truth_entry)},
	    sizeof(struct answer));
	for (size_t i = 0; i < count; i++)
		put(client, &record_read(node->model, all[i])->truth, sizeof(struct truth_entry));
}

static bool switch_unsupported(struct node *node, const char *name, bool on)
{
	for (size_t i = 0; i < node->unsupported_count; i++)
		if (strcmp(node->unsupported[i], name) == 0) {
			if (!on)
				memmove(node->unsupported[i], node->unsupported[--node->unsupported_count],
					sizeof(node->unsupported[i]));
			return true;
		}
	if (!on || node->unsupported_count == MOST_FAULTS)
		return !on;
	snprintf(node->unsupported[node->unsupported_count++], sizeof(node->unsupported[0]), "%s", name);
	return true;
}

/* The driver's clients are thrown out, as when it crashes or is forced out. */
static void unload(struct node *node)
{
	for (struct client *other = node->clients; other; other = other->next)
		if (other->kind == HELLO_CUDA || other->kind == HELLO_NVML)
			other->doomed = true;
	samples_forget(node);
	node->unloaded = true;
}

static uint32_t split(struct node *node, const struct query *query)
{
	struct mig_profile profiles[MAX_INSTANCES] = {0};
	bool mode = strcmp(query->name, "off") != 0;

	if (mode && !mig_parse(query->name, node->config.memory_bytes, profiles))
		return EINVAL;
	return mig_split(node, query->device, mode, profiles);
}

static uint32_t fault(struct node *node, const struct query *query)
{
	if (strcmp(query->text, "lose") == 0 || strcmp(query->text, "restore") == 0)
		node->lost[node->facts[query->device].gpu] = query->text[0] == 'l';
	else if (strcmp(query->text, "driver-unload") == 0)
		unload(node);
	else if (strcmp(query->text, "driver-load") == 0)
		node->unloaded = false;
	else if (strcmp(query->text, "mig") == 0)
		return split(node, query);
	else if (strcmp(query->text, "checkpoint-fails") == 0)
		return checkpoint_fault(node, (uint32_t)query->a);
	else if (strcmp(query->text, "drop-samples") == 0)
		node->drop_samples = query->a;
	else if (strcmp(query->text, "unsupported") == 0 || strcmp(query->text, "supported") == 0)
		return switch_unsupported(node, query->name, query->text[0] == 'u') ? 0 : ENOSPC;
	else if (strcmp(query->text, "xid") == 0) {
		uint64_t sequence = ++node->xid_count;

		node->xids[(sequence - 1) % XIDS] =
			(struct xid_event){sequence, query->device, (uint32_t)query->a, (uint32_t)query->b, 0};
	} else
		return EINVAL;
	return 0;
}

static bool is_unsupported(const struct node *node, const char *name)
{
	for (size_t i = 0; i < node->unsupported_count; i++)
		if (strcmp(node->unsupported[i], name) == 0)
			return true;
	return false;
}

void query_answer(struct node *node, struct client *client, const struct query *query)
{
	if (query->device >= device_count(node->model)) {
		query_reply(client, ENODEV, NULL, 0, 0);
		return;
	}
	switch (query->op) {
	case Q_DEVICES:
		query_reply(client, 0, node->facts, device_count(node->model), sizeof(node->facts[0]));
		return;
	case Q_DEVICE_STATE:
		device_state(node, client, query->device);
		return;
	case Q_PROCESSES:
		processes(node, client, query->device);
		return;
	case Q_PROCESS_SAMPLES:
		sample_list(client, &node->process_samples[query->device], query->a);
		return;
	case Q_DEVICE_SAMPLES:
		sample_list(client, &node->device_samples[query->device], query->a);
		return;
	case Q_XIDS:
		xid_list(node, client, query->a);
		return;
	case Q_FAULT:
		query_reply(client, fault(node, query), NULL, 0, 0);
		return;
	case Q_UNSUPPORTED:
		query_reply(client, 0, "", is_unsupported(node, query->name), 1);
		return;
	case Q_TRUTH:
		truth(node, client);
		return;
	case Q_CHECKPOINT:
		checkpoint_ask(node, client, query);
		return;
	case Q_MPS_STATUS:
	case Q_MPS_START:
	case Q_MPS_QUIT:
	case Q_MPS_SET:
	case Q_MPS_CLIENTS:
	case Q_MPS_TERMINATE:
		mps_answer(node, client, query);
		return;
	}
	query_reply(client, EINVAL, NULL, 0, 0);
}
