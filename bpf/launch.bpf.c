// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "bounds.bpf.h"
#include "context.bpf.c"
#include "copy.bpf.h"
#include "graph.bpf.c"
#include "process.bpf.h"
#include "wait.bpf.c"

struct launch_config { /* the head of CUlaunchConfig */
	__u32 grid[3];
	__u32 block[3];
	__u32 shared_bytes, _pad;
	__u64 stream;
};

struct launch_parameters { /* CUDA_LAUNCH_PARAMS */
	__u64 function;
	__u32 grid[3];
	__u32 block[3];
	__u32 shared_bytes, _pad;
	__u64 stream, parameters;
};

/* One launch, whatever call it came by. */
struct grid {
	__u64 function;
	__u64 kernels;
	__u64 blocks;
	struct waves waves;
	__u32 threads_per_block;
	__u32 _pad;
	__u64 stream;
};

static __always_inline void read_config(struct grid *grid, __u64 address)
{
	struct launch_config config = {};

	if (bpf_probe_read_user(&config, sizeof(config), (void *)address))
		count_lost(LOST_USER_READ);
	grid->blocks = grid_blocks(config.grid[0], config.grid[1], config.grid[2]);
	grid->threads_per_block = config.block[0] * config.block[1] * config.block[2];
	grid->stream = config.stream; /* as it stands there */
}

/* Arguments that cannot be read leave zeroes: the launch is counted all the same. */
static __always_inline void read_grid(struct pt_regs *ctx, __u64 cookie, struct grid *grid)
{
	struct arguments arguments = read_arguments(ctx);
	struct last_arguments last;

	grid->function = arguments.first;
	grid->kernels = 1;
	switch (COOKIE_SHAPE(cookie)) {
	case LAUNCH_ARGUMENTS:
		last = read_last_arguments(ctx);
		grid->blocks = grid_blocks(arguments.second, arguments.third, arguments.fourth);
		grid->threads_per_block = (__u32)arguments.fifth * (__u32)ARGUMENT_6(ctx) * (__u32)last.seventh;
		grid->stream = stream_named(last.ninth, cookie);
		return;
	case LAUNCH_CONFIG:
		grid->function = arguments.second;
		read_config(grid, arguments.first);
		grid->stream = stream_named(grid->stream, cookie);
		return;
	case LAUNCH_LEGACY_1: /* its block was set beforehand: threads_per_block stays unknown */
		grid->blocks = 1;
		break;
	case LAUNCH_LEGACY_3:
		grid->blocks = grid_blocks(arguments.second, arguments.third, 1);
		break;
	}
	grid->stream = stream_of(ctx, cookie);
}

static __always_inline void count_launch(const struct process_id *id, __u32 device, const struct grid *grid, __u64 now)
{
	struct launch_key key = {.process = *id, .device = device, .function = grid->function};
	struct launch_value initial = {};
	struct launch_value *value = NULL;

	if (grid->function) /* 0 is in the other map alone: the sums of both would be taken for one that moves */
		value = find_or_add(&launches, &key, &initial, LOST_LAUNCH_FUNCTION);
	if (!value) {
		key.function = 0;
		value = find_or_add(&other_launches, &key, &initial, LOST_LAUNCH);
	}
	if (!value)
		return;
	__sync_fetch_and_add(&value->launches, 1);
	__sync_fetch_and_add(&value->kernels, grid->kernels);
	__sync_fetch_and_add(&value->blocks, grid->blocks);
	__sync_fetch_and_add(&value->waves, grid->waves.count);
	__sync_fetch_and_add(&value->wave_sms, grid->waves.sms);
	value->last_ns = now;
	value->threads_per_block = grid->threads_per_block;
}

/*
 * A graph's launch does what the graph holds. Whether it has memory: taking that from here would be more than the 512
 * bytes of stack that Linux 6.1 allows a chain of calls. No inline function: see count_copy.
 */
__noinline int replay_graph(struct grid *grid, __u32 device)
{
	struct process_id id = this_process();
	struct graph *graph = grid ? find_graph(&id, grid->function) : NULL;

	if (!graph) {
		count_lost(LOST_GRAPH);
		return 0;
	}
	grid->kernels = cut(graph->work.kernels, MOST_KERNELS);
	grid->blocks = cut(graph->work.blocks, MOST_GRID_BLOCKS);
	grid->waves = (struct waves){graph->work.waves, graph->work.wave_sms};
	grid->threads_per_block = graph->work.threads_per_block;
	for (__u32 i = 0; i < COPY_LOCAL; i++)
		if (graph->work.copies[i])
			book_copies(&id, device, i, graph->work.bytes[i], graph->work.copies[i]);
	return graph->memory_most_bytes != 0;
}

/* True when the launch does not run now, but becomes part of a graph. */
static __always_inline int capture_launch(const struct process_id *id, const struct process *process, __u32 shape,
					  const struct grid *grid)
{
	struct graph *capture = find_capture(id, process, grid->stream), *child;

	if (!capture)
		return 0;
	child = shape == LAUNCH_GRAPH ? find_graph(id, grid->function) : NULL;
	if (child)
		add_work(&capture->work, &child->work);
	else
		add_kernel(&capture->work, grid->blocks, grid->threads_per_block);
	return 1;
}

/*
 * 1 + slot where a periodic process's request begins, else 0: it may have to wait, which is not begun from here, as the
 * stacks of this and of that together are more than Linux 6.1 allows a chain of calls.
 */
static __always_inline __u32 enter_launch(const struct process_id *id, struct process *process, struct thread *thread,
					  __u32 device, const struct grid *grid)
{
	__u64 now = bpf_ktime_get_ns();
	struct process_id payer = *id;
	struct rule *rule;
	__u32 slot;

	count_launch(id, device, grid, now);
	rule = rule_of(id, process, thread, &payer, now);
	slot = rule ? slot_of(rule, device) : SLOT_NONE;
	if (rule && slot == SLOT_NONE && device == DEVICE_UNKNOWN && rule->role == ROLE_OFFLINE)
		slot = busy_slot(rule, now);
	if (process) {
		open_request(process, thread, rule, slot, grid->function, now);
		note_stream(&process->streams, grid->stream, now, 1);
	}
	if (thread)
		note_stream(&thread->streams, grid->stream, now, 0);
	if (rule && rule->role == ROLE_OFFLINE)
		pace_launch(&payer, process, thread, rule, slot, grid->blocks, now);
	else if (rule && rule->role == ROLE_ONLINE)
		count_online(slot, grid->blocks);
	return rule && rule->role == ROLE_PERIODIC && process && process->start_ns == now ? slot + 1 : 0;
}

PROBE("uprobe", launch_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 shape = COOKIE_SHAPE(cookie);
	struct thread *thread = own_thread();
	struct process_id id = process_of(thread);
	struct process *process = find_process(&id, cookie);
	struct grid grid = {};
	__u32 device, begun;

	if (is_duplicate_of(thread, ctx, cookie))
		return 0;
	read_grid(ctx, cookie, &grid);
	if (process && capture_launch(&id, process, shape, &grid))
		return 0;
	device = device_of(thread);
	if (shape != LAUNCH_GRAPH)
		grid.waves = waves_of(grid.blocks, grid.threads_per_block);
	else if (replay_graph(&grid, device))
		hold_graph_memory(grid.function);
	begun = enter_launch(&id, process, thread, device, &grid);
	if (begun)
		begin_periodic(begun - 1);
	return 0;
}

/* One of many, by its struct launch_parameters. No inline function: see count_copy. */
__noinline int enter_one_launch(__u64 parameters, __u32 device)
{
	struct process_id id = this_process();
	struct launch_parameters one = {};
	struct grid grid = {.kernels = 1};

	if (bpf_probe_read_user(&one, sizeof(one), (void *)parameters))
		count_lost(LOST_USER_READ);
	grid.function = one.function;
	grid.stream = stream_named(one.stream, 0);
	grid.blocks = grid_blocks(one.grid[0], one.grid[1], one.grid[2]);
	grid.threads_per_block = one.block[0] * one.block[1] * one.block[2];
	grid.waves = waves_of(grid.blocks, grid.threads_per_block);
	return enter_launch(&id, bpf_map_lookup_elem(&processes, &id), this_thread(), device, &grid);
}

/* One kernel on each of several devices; which they are only the streams know, so the ordinal stays unknown. */
PROBE("uprobe", launch_many_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	__u32 count = arguments.second, device, begun = 0;

	if (!begin_call(ctx, cookie, &id))
		return 0;
	device = count == 1 ? current_device() : DEVICE_UNKNOWN;
	for (__u32 i = 0; i < MOST_OF_MANY && i < count; i++)
		begun = enter_one_launch(arguments.first + i * sizeof(struct launch_parameters), device) ?: begun;
	if (begun)
		begin_periodic(begun - 1);
	return 0;
}
