// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "maps.bpf.h"
#include "context.bpf.c"
#include "wait.bpf.c"

struct launch_config { /* the head of CUlaunchConfig */
	__u32 grid[3];
	__u32 block[3];
};

struct grid {
	__u64 function;
	__u64 blocks;
	__u32 threads_per_block;
};

/* y × z of a block: arguments six and seven of cuLaunchKernel. */
static __always_inline __u32 block_rows(struct pt_regs *ctx)
{
#if defined(__TARGET_ARCH_x86)
	__u32 z = 1;

	if (bpf_probe_read_user(&z, sizeof(z), (void *)(PT_REGS_SP(ctx) + 8)))
		count_lost(LOST_USER_READ);
	return (__u32)ctx->r9 * z;
#elif defined(__TARGET_ARCH_arm64)
	struct user_pt_regs *regs = (void *)ctx;

	return (__u32)regs->regs[5] * (__u32)regs->regs[6];
#endif
}

/* Arguments that cannot be read leave zeroes: the launch is counted all the same. */
static __always_inline void read_grid(struct pt_regs *ctx, __u32 shape, struct grid *grid)
{
	struct arguments arguments = read_arguments(ctx);
	struct launch_config config = {};

	if (shape == LAUNCH_ARGUMENTS) {
		grid->function = arguments.first;
		grid->blocks = (__u64)(__u32)arguments.second * (__u32)arguments.third * (__u32)arguments.fourth;
		grid->threads_per_block = (__u32)arguments.fifth * block_rows(ctx);
	} else if (shape == LAUNCH_CONFIG) {
		grid->function = arguments.second;
		if (bpf_probe_read_user(&config, sizeof(config), (void *)arguments.first))
			count_lost(LOST_USER_READ);
		grid->blocks = (__u64)config.grid[0] * config.grid[1] * config.grid[2];
		grid->threads_per_block = config.block[0] * config.block[1] * config.block[2];
	} else {
		grid->function = arguments.first;
	}
}

static __always_inline void count_launch(const struct process_id *id, __u32 device, const struct grid *grid, __u64 now)
{
	struct launch_key key = {.process = *id, .device = device, .function = grid->function};
	struct launch_value initial = {};
	struct launch_value *value = find_or_add(&launches, &key, &initial, LOST_LAUNCH_FUNCTION);

	if (!value) {
		key.function = 0;
		value = find_or_add(&other_launches, &key, &initial, LOST_LAUNCH);
	}
	if (!value)
		return;
	__sync_fetch_and_add(&value->launches, 1);
	__sync_fetch_and_add(&value->blocks, grid->blocks);
	value->last_ns = now;
	value->threads_per_block = grid->threads_per_block;
}

SEC("uprobe")
int launch_enter(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u64 now = bpf_ktime_get_ns();
	struct process_id id = this_process();
	struct grid grid = {};
	struct process *process;
	struct rule *rule;
	__u32 device, slot;

	if (is_duplicate(ctx, cookie))
		return 0;
	device = current_device();
	read_grid(ctx, COOKIE_SHAPE(cookie), &grid);
	count_launch(&id, device, &grid, now);
	process = find_process(&id, cookie);
	if (!process)
		return 0;
	rule = bpf_map_lookup_elem(&rules, &id);
	slot = rule ? slot_of(rule, device) : SLOT_NONE;
	open_request(process, rule, slot, now);
	if (rule && rule->role == ROLE_OFFLINE)
		pace_launch(&id, process, rule, slot, now);
	return 0;
}
