/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * MIG: each instance is a device of the model of its own, so nothing of one can reach another. An index stands for one
 * instance for good, so that the truth stays readable: a layout that comes back finds its old indices again.
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "server.h"

/* The real numbers of GPU instances: 7g is 0, 4g and 3g begin at 1, 2g at 3, 1g at 7. */
static unsigned first_id(unsigned slices)
{
	return slices == 7 ? 0 : slices >= 3 ? 1 : slices == 2 ? 3 : 7;
}

static struct device_facts describe(const struct node *node, unsigned gpu, const struct mig_profile *profile,
				    unsigned id)
{
	struct device_facts facts = node->facts[gpu];

	facts.mig_mode = 0;
	facts.is_instance = 1;
	facts.gpu = gpu;
	facts.gpu_instance = id;
	facts.slices = profile->slices;
	facts.sms = mig_sms(profile->slices, facts.sms);
	facts.memory_bytes = (uint64_t)profile->gigabytes << 30;
	snprintf(facts.uuid, sizeof(facts.uuid), "MIG-%08x-51a1-5000-8000-%04x%04x%04x", 0x5e1f0000u + gpu, id,
		 profile->slices, profile->gigabytes);
	snprintf(facts.name, sizeof(facts.name), "%.40s MIG %ug.%ugb", node->config.name, profile->slices,
		 profile->gigabytes);
	return facts;
}

/* The index of this instance, an old or a new one; MAX_DEVICES: there are no more. */
static unsigned place(struct node *node, struct device_facts *facts)
{
	unsigned count = device_count(node->model);

	for (unsigned d = node->config.gpus; d < count; d++)
		if (strcmp(node->facts[d].uuid, facts->uuid) == 0)
			return d;
	if (count == MAX_DEVICES)
		return MAX_DEVICES;
	facts->index = count;
	node->facts[count] = *facts;
	return device_add(node->model, facts->sms, facts->memory_bytes);
}

static bool is_idle(const struct node *node, unsigned gpu)
{
	for (unsigned d = 0; d < device_count(node->model); d++)
		if (node->facts[d].gpu == gpu && !device_idle(node->model, d))
			return false;
	return true;
}

static unsigned place_all(struct node *node, unsigned gpu, const struct mig_profile *profiles,
			  unsigned places[MAX_INSTANCES])
{
	unsigned count = 0, taken[16] = {0};

	for (; count < MAX_INSTANCES && profiles[count].slices; count++) {
		unsigned first = first_id(profiles[count].slices);
		struct device_facts facts = describe(node, gpu, &profiles[count], first + taken[first]++);

		places[count] = place(node, &facts);
		if (places[count] == MAX_DEVICES)
			break;
	}
	return count;
}

uint32_t mig_split(struct node *node, unsigned gpu, bool mode, const struct mig_profile profiles[MAX_INSTANCES])
{
	unsigned places[MAX_INSTANCES], count;

	if (gpu >= node->config.gpus)
		return ENODEV;
	if (!is_idle(node, gpu))
		return EBUSY;
	count = place_all(node, gpu, profiles, places);
	if (count < MAX_INSTANCES && profiles[count].slices)
		return ENOSPC;
	for (unsigned d = node->config.gpus; d < device_count(node->model); d++)
		if (node->facts[d].gpu == gpu)
			node->facts[d].present = 0;
	for (unsigned i = 0; i < count; i++) {
		node->facts[places[i]].present = 1;
		node->facts[places[i]].position = i;
	}
	node->facts[gpu].mig_mode = mode;
	node->generation++;
	return 0;
}

/* A GPU in MIG mode does nothing itself: it shows what its instances do together. */
void mig_sum(const struct node *node, unsigned gpu, struct device_state *state)
{
	double part;

	for (unsigned d = node->config.gpus; d < device_count(node->model); d++) {
		struct device_state own = {0};

		if (node->facts[d].gpu != gpu)
			continue;
		device_read(node->model, d, &own);
		part = (double)node->facts[d].sms / (double)node->facts[gpu].sms;
		state->sm_active_ns += (uint64_t)((double)own.sm_active_ns * part);
		state->busy_ns += (uint64_t)((double)own.busy_ns * part);
		state->tx_bytes += own.tx_bytes;
		state->rx_bytes += own.rx_bytes;
		state->dram_bytes += own.dram_bytes;
		state->dram_bytes_per_second += own.dram_bytes_per_second;
		state->dram_bytes += own.dram_bytes;
		state->dram_bytes_per_second += own.dram_bytes_per_second;
		state->memory_used += own.memory_used;
	}
}
