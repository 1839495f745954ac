/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* What is being captured, and what a graph holds. */
#pragma once
#include "maps.bpf.h"
#include "waves.bpf.h"

static __always_inline struct graph *find_graph(const struct process_id *id, __u64 handle)
{
	struct graph_key key = {.process = *id, .handle = handle};

	return bpf_map_lookup_elem(&graphs, &key);
}

/* The capture that this call becomes part of; NULL: none, it runs. `stream` 0: only this thread's own capture. */
static __always_inline struct graph *find_capture(const struct process_id *id, const struct process *process,
						  __u64 stream)
{
	struct graph_key key = {.process = *id, .handle = stream};
	struct thread *thread;
	struct graph *own;

	if (!process || process->captures <= 0)
		return NULL;
	thread = this_thread();
	if (thread && thread->capturing) {
		key.handle = thread->captured_stream;
		own = bpf_map_lookup_elem(&captures, &key);
		if (own)
			return own;
		thread->capturing = 0; /* another thread ended it */
		key.handle = stream;
	}
	return bpf_map_lookup_elem(&captures, &key);
}

static __always_inline void add_kernel(struct graph *graph, __u64 blocks, __u32 threads_per_block)
{
	struct waves waves = waves_of(blocks, threads_per_block);

	__sync_fetch_and_add(&graph->kernels, 1);
	__sync_fetch_and_add(&graph->blocks, blocks);
	__sync_fetch_and_add(&graph->waves, waves.count);
	__sync_fetch_and_add(&graph->wave_sms, waves.sms);
	if (threads_per_block)
		graph->threads_per_block = threads_per_block;
}

static __always_inline void add_copy(struct graph *graph, __u32 direction, __u64 bytes)
{
	if (direction >= COPY_DIRECTIONS)
		return;
	__sync_fetch_and_add(&graph->bytes[direction], bytes);
	__sync_fetch_and_add(&graph->copies[direction], 1);
}

static __always_inline void add_graph(struct graph *to, const struct graph *from)
{
	__sync_fetch_and_add(&to->kernels, from->kernels);
	__sync_fetch_and_add(&to->blocks, from->blocks);
	__sync_fetch_and_add(&to->waves, from->waves);
	__sync_fetch_and_add(&to->wave_sms, from->wave_sms);
	if (from->threads_per_block)
		to->threads_per_block = from->threads_per_block;
	for (int i = 0; i < COPY_DIRECTIONS; i++) {
		__sync_fetch_and_add(&to->bytes[i], from->bytes[i]);
		__sync_fetch_and_add(&to->copies[i], from->copies[i]);
	}
}
