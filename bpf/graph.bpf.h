/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* What is being captured, and what a graph holds. */
#pragma once
#include "bounds.bpf.h"
#include "stream.bpf.h"
#include "waves.bpf.h"

static __always_inline struct graph *find_graph(const struct process_id *id, __u64 handle)
{
	struct graph_key key = {.process = *id, .handle = handle};

	return bpf_map_lookup_elem(&graphs, &key);
}

/* Of so much that what is added next could come near to wrapping. */
static __always_inline int is_full(const struct work *work)
{
	__u32 nodes = work->kernels;
	__u64 bytes = 0;

	for (int i = 0; i < COPY_LOCAL; i++) {
		nodes |= work->copies[i];
		bytes |= work->bytes[i];
	}
	return nodes >= MOST_KERNELS || bytes >= MOST_BYTES || work->blocks >= MOST_GRID_BLOCKS;
}

/* What is full stays as it is: a graph that holds itself, and that again, would be as much as one likes. */
static __always_inline void fill_up(struct work *work)
{
	count_lost(LOST_BOUNDS);
	work->kernels = MOST_KERNELS;
}

static __always_inline void add_kernel(struct work *work, __u64 blocks, __u32 threads_per_block)
{
	struct waves waves = waves_of(blocks, threads_per_block);

	if (is_full(work)) {
		fill_up(work);
		return;
	}
	__sync_fetch_and_add(&work->kernels, 1);
	__sync_fetch_and_add(&work->blocks, blocks);
	__sync_fetch_and_add(&work->waves, waves.count);
	__sync_fetch_and_add(&work->wave_sms, waves.sms);
	if (threads_per_block)
		work->threads_per_block = threads_per_block;
}

static __always_inline void add_copy(struct work *work, __u32 direction, __u64 bytes)
{
	if (is_full(work)) {
		fill_up(work);
		return;
	}
	bytes = cut(bytes, MOST_BYTES);
	barrier_var(
		direction); /* checked where it is used: older kernels forget the bound of what is kept over a call */
	if (direction >= COPY_LOCAL)
		return;
	__sync_fetch_and_add(&work->bytes[direction], bytes);
	__sync_fetch_and_add(&work->copies[direction], 1);
}

static __always_inline void add_work(struct work *to, const struct work *from)
{
	if (is_full(to) || is_full(from)) {
		fill_up(to);
		return;
	}
	__sync_fetch_and_add(&to->kernels, from->kernels);
	__sync_fetch_and_add(&to->blocks, from->blocks);
	__sync_fetch_and_add(&to->waves, from->waves);
	__sync_fetch_and_add(&to->wave_sms, from->wave_sms);
	if (from->threads_per_block)
		to->threads_per_block = from->threads_per_block;
	for (int i = 0; i < COPY_LOCAL; i++) {
		__sync_fetch_and_add(&to->bytes[i], from->bytes[i]);
		__sync_fetch_and_add(&to->copies[i], from->copies[i]);
	}
}

static __always_inline void remove_work(struct work *from, const struct work *work)
{
	if (is_full(from))
		return; /* what it held beyond that is not known */
	__sync_fetch_and_add(&from->kernels, -work->kernels);
	__sync_fetch_and_add(&from->blocks, -work->blocks);
	__sync_fetch_and_add(&from->waves, -work->waves);
	__sync_fetch_and_add(&from->wave_sms, -work->wave_sms);
	for (int i = 0; i < COPY_LOCAL; i++) {
		__sync_fetch_and_add(&from->bytes[i], -work->bytes[i]);
		__sync_fetch_and_add(&from->copies[i], -work->copies[i]);
	}
}

/* The graph has so much more while it runs. On one device: what is on another is lost. */
static __always_inline void graph_allocates(const struct process_id *id, struct graph *graph, __u64 address,
					    __u64 bytes, __u32 device)
{
	struct graph_key key = {.process = *id, .handle = address};
	struct graph_memory allocated = {.bytes = bytes, .graph_ns = graph->made_ns};

	device = known_ordinal(device);
	if (bytes > MOST_BYTES || graph->memory_bytes > MOST_BYTES) {
		count_lost(LOST_BOUNDS);
		return;
	}
	if (graph->memory_most_bytes && graph->memory_device != device) {
		count_lost(LOST_ALLOCATION);
		return;
	}
	put(&graph_memories, &key, &allocated, LOST_GRAPH_MEMORY);
	graph->memory_device = device;
	graph->memory_bytes += bytes;
	if (graph->memory_bytes > graph->memory_most_bytes)
		graph->memory_most_bytes = graph->memory_bytes;
}

/* Of what another graph allocated nothing is taken off. */
static __always_inline void graph_frees(const struct process_id *id, struct graph *graph, __u64 address)
{
	struct graph_key key = {.process = *id, .handle = address};
	struct graph_memory *allocated = bpf_map_lookup_elem(&graph_memories, &key);

	if (allocated && allocated->graph_ns == graph->made_ns && allocated->bytes <= graph->memory_bytes)
		graph->memory_bytes -= allocated->bytes;
}

static __always_inline void add_graph_memory(struct graph *to, const struct graph *from)
{
	if (!from->memory_most_bytes)
		return;
	if (to->memory_most_bytes && to->memory_device != from->memory_device) {
		count_lost(LOST_ALLOCATION);
		return;
	}
	if (to->memory_bytes > MOST_BYTES || from->memory_bytes > MOST_BYTES) {
		count_lost(LOST_BOUNDS);
		return;
	}
	if (to->memory_bytes + from->memory_most_bytes > to->memory_most_bytes)
		to->memory_most_bytes = to->memory_bytes + from->memory_most_bytes;
	to->memory_bytes += from->memory_bytes;
	to->memory_device = from->memory_device;
}
