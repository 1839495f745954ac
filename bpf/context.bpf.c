// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "maps.bpf.h"

/* The ordinal of the device that this thread works on. */
static __always_inline __u32 current_device(void)
{
	__u64 tid = bpf_get_current_pid_tgid();
	struct context_stack *stack = bpf_map_lookup_elem(&current_context, &tid);

	if (!stack || stack->depth == 0)
		return DEVICE_UNKNOWN;
	return stack->devices[(stack->depth - 1) & (CONTEXT_DEPTH - 1)];
}

static __always_inline __u32 device_of(__u64 context)
{
	struct context_key key = {.process = this_process(), .context = context};
	__u32 *device = bpf_map_lookup_elem(&contexts, &key);

	return device ? *device : DEVICE_UNKNOWN;
}

static __always_inline void make_current(__u32 shape, __u32 device)
{
	__u64 tid = bpf_get_current_pid_tgid();
	struct context_stack empty = {};
	struct context_stack *stack = find_or_add(&current_context, &tid, &empty, LOST_THREAD);

	if (!stack)
		return;
	if (shape == CONTEXT_SET && stack->depth > 0)
		stack->depth--;
	if (stack->depth < CONTEXT_DEPTH)
		stack->depth++;
	stack->devices[(stack->depth - 1) & (CONTEXT_DEPTH - 1)] = device;
}

SEC("uprobe")
int context_enter(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	__u32 shape = COOKIE_SHAPE(cookie);
	struct call_key key = {.pid_tgid = bpf_get_current_pid_tgid(), .role = CALL_CONTEXT};
	struct arguments arguments = read_arguments(ctx);
	struct call call = {.a = arguments.first, .c = shape};

	if (is_duplicate(ctx, cookie))
		return 0;
	if (shape == CONTEXT_SET && !call.a)
		shape = CONTEXT_POP; /* as the driver: uncovers the one below */
	if (shape == CONTEXT_SET || shape == CONTEXT_PUSH) {
		make_current(shape, device_of(call.a));
		return 0;
	}
	if (shape == CONTEXT_POP) {
		struct context_stack *stack = bpf_map_lookup_elem(&current_context, &key.pid_tgid);

		if (stack && stack->depth > 0)
			stack->depth--;
		return 0;
	}
	if (shape == CONTEXT_RETAIN)
		call.b = arguments.second;
	else if (shape == CONTEXT_CREATE_3)
		call.b = arguments.third;
	else if (shape == CONTEXT_CREATE_4)
		call.b = arguments.fourth;
	else
		call.b = arguments.fifth;
	if (bpf_map_update_elem(&calls, &key, &call, BPF_ANY))
		count_lost(LOST_CALL);
	return 0;
}

SEC("uretprobe")
int context_return(struct pt_regs *ctx)
{
	struct call_key key = {.pid_tgid = bpf_get_current_pid_tgid(), .role = CALL_CONTEXT};
	struct call *call = bpf_map_lookup_elem(&calls, &key);
	struct context_key made = {.process = this_process()};
	__u32 device;

	if (!call)
		return 0;
	device = call->b;
	if (PT_REGS_RC(ctx) == 0) {
		if (bpf_probe_read_user(&made.context, sizeof(made.context), (void *)call->a))
			count_lost(LOST_USER_READ);
		else
			bpf_map_update_elem(&contexts, &made, &device, BPF_ANY);
		if (call->c != CONTEXT_RETAIN)
			make_current(CONTEXT_PUSH, device);
	}
	bpf_map_delete_elem(&calls, &key);
	return 0;
}
