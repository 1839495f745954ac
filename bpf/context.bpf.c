// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "bounds.bpf.h"
#include "memory.bpf.h"
#include "process.bpf.h"

/* What is on top of a stack of contexts. */
static __always_inline struct current top_of(const struct context_stack *stack)
{
	struct current unknown = {.device = DEVICE_UNKNOWN};

	if (!stack || stack->depth == 0 || stack->depth > CONTEXT_DEPTH)
		return unknown;
	return stack->entries[(stack->depth - 1) & (CONTEXT_DEPTH - 1)];
}

static __always_inline struct current current_context(void)
{
	return top_of(this_stack());
}

static __always_inline __u32 current_device(void)
{
	return current_context().device;
}

/* The same, at less cost. */
static __always_inline __u32 device_of(const struct thread *thread)
{
	return thread && thread->device ? thread->device - 1 : current_device();
}

/* This thread's stack is another one. */
static __always_inline void note_device(const struct context_stack *stack)
{
	struct thread *thread = own_thread();
	__u32 device = top_of(stack).device;

	if (thread)
		thread->device = device == DEVICE_UNKNOWN ? 0 : device + 1;
}

static __always_inline struct context *find_context(const struct process_id *id, __u64 handle)
{
	struct context_key key = {.process = *id, .context = handle};

	return bpf_map_lookup_elem(&contexts, &key);
}

static __always_inline void put_context(const struct process_id *id, __u64 handle, const struct context *context)
{
	struct context_key key = {.process = *id, .context = handle};

	put(&contexts, &key, context, LOST_CONTEXT);
}

static __always_inline void push_context(const struct process_id *id, __u64 handle)
{
	struct context *context = find_context(id, handle);
	struct context_stack *stack = own_stack();
	struct current *entry;

	if (!stack)
		return;
	stack->depth++;
	if (stack->depth <= CONTEXT_DEPTH) {
		entry = &stack->entries[(stack->depth - 1) & (CONTEXT_DEPTH - 1)];
		entry->context = context && context->primary ? context->primary : handle;
		entry->device = context ? context->device : DEVICE_UNKNOWN;
	}
	note_device(stack);
}

static __always_inline void pop_context(void)
{
	struct context_stack *stack = this_stack();

	if (!stack || stack->depth == 0)
		return;
	stack->depth--;
	note_device(stack);
}

/* A context is made, and becomes current. */
static __always_inline void create_context(const struct process_id *id, __u64 handle, __u32 device)
{
	struct context made = {.device = device};

	put_context(id, handle, &made);
	push_context(id, handle);
}

static __always_inline void retain_primary(const struct process_id *id, __u64 handle, __u32 device)
{
	struct context made = {.device = device};
	struct context *known = find_context(id, device);
	struct context primary = {.primary = handle, .device = device, .users = 1};

	put_context(id, handle, &made);
	if (device == DEVICE_UNKNOWN)
		return;
	if (known && (known->primary == handle || !known->primary)) {
		known->primary = handle;
		__sync_fetch_and_add(&known->users, 1);
	} else {
		put_context(id, device, &primary);
	}
}

static __always_inline void end_context(const struct process_id *id, __u64 handle)
{
	struct context_key key = {.process = *id, .context = handle};

	end_context_memory(id, handle);
	drop(&contexts, &key, LOST_CONTEXT);
}

struct ended_context {
	struct process_id process;
	__u64 context;
};

static long end_if_of_context(void *map, struct graph_key *key, struct graph *capture, struct ended_context *ended)
{
	struct process *process;

	if (key->process.tgid != ended->process.tgid || key->process.start_ticks != ended->process.start_ticks ||
	    capture->source_ns != ended->context)
		return 0;
	process = bpf_map_lookup_elem(&processes, &ended->process);
	if (!drop(map, key, LOST_NEW_GRAPH) && process)
		__sync_fetch_and_add(&process->captures, -1);
	return 0;
}

/* Streams end with their context: others may have their handles then. `context` 0: one that is not known. */
static __always_inline void end_captures(const struct process_id *id, __u64 context)
{
	struct ended_context ended = {.process = *id, .context = context};
	struct process *process = bpf_map_lookup_elem(&processes, id);

	if (process && process->captures > 0)
		bpf_for_each_map_elem(&captures, end_if_of_context, &ended, 0);
}

static __always_inline void release_primary(const struct process_id *id, __u32 device, int all)
{
	struct context_key key = {.process = *id, .context = device};
	struct context *primary = bpf_map_lookup_elem(&contexts, &key);
	__u64 handle;

	if (!primary || !primary->users) { /* retained before the probes were there */
		end_captures(id, 0);
		return;
	}
	primary->users = all ? 0 : primary->users - 1;
	handle = primary->primary;
	if (primary->users)
		return;
	end_captures(id, handle);
	if (handle) /* else it was retained before the probes were there, and may be still */
		end_context_memory(id, handle);
	if (handle && find_context(id, GREEN_MEMORY(device)))
		end_context(id, GREEN_MEMORY(device));
	drop(&contexts, &key,
	     LOST_CONTEXT); /* its handle stays known: a thread may have it current, and retain it again */
}

static __always_inline void create_green(const struct process_id *id, __u64 handle, __u32 device)
{
	struct context made = {.primary = GREEN_MEMORY(device), .device = device};
	struct context first = {.device = device, .users = 1};
	struct context *primary = find_context(id, device);

	if (device == DEVICE_UNKNOWN)
		return;
	if (primary)
		__sync_fetch_and_add(&primary->users, 1);
	else
		put_context(id, device, &first);
	if (primary && primary->primary)
		made.primary = primary->primary;
	else
		put_context(id, GREEN_MEMORY(device), &made);
	put_context(id, handle, &made);
}

/* The same context by a handle that can be made current. */
static __always_inline void name_green(const struct process_id *id, __u64 handle, __u64 green)
{
	struct context *known = find_context(id, green);
	struct context same;

	if (!known)
		return;
	same = *known;
	put_context(id, handle, &same);
}

static __always_inline void end_green(const struct process_id *id, __u64 handle)
{
	struct context_key key = {.process = *id, .context = handle};
	struct context *known = find_context(id, handle);
	__u32 device;

	if (!known)
		return;
	device = known->device;
	drop(&contexts, &key, LOST_CONTEXT);
	release_primary(id, device, 0);
}

/* `is_final`: it goes before what was learned by the older call. */
static __always_inline void learn_uuid(const struct process_id *id, __u64 address, __u32 ordinal, int is_final)
{
	struct ordinal_key key = {.process = *id, .ordinal = ordinal};
	struct uuid uuid;

	if (known_ordinal(ordinal) == DEVICE_UNKNOWN)
		return;
	if (bpf_probe_read_user(&uuid, sizeof(uuid), (void *)address))
		count_lost(LOST_USER_READ);
	else if (is_final || !bpf_map_lookup_elem(&uuids, &key))
		put(&uuids, &key, &uuid, LOST_UUID);
}

static __always_inline void learn_bus_id(const struct process_id *id, __u64 device, __u64 text)
{
	struct ordinal_key key = {.process = *id};
	struct bus_id bus = {};
	long length = bpf_probe_read_user_str(bus.text, sizeof(bus.text), (void *)text);

	if (length < 0 || bpf_probe_read_user(&key.ordinal, sizeof(key.ordinal), (void *)device))
		count_lost(LOST_USER_READ);
	else if (known_ordinal(key.ordinal) != DEVICE_UNKNOWN)
		put(&bus_ids, &key, &bus, LOST_UUID);
}

static __always_inline __u64 device_argument(__u32 shape, const struct arguments *arguments)
{
	switch (shape) {
	case CONTEXT_CREATE_3:
	case CONTEXT_GREEN:
		return arguments->third;
	case CONTEXT_CREATE_4:
		return arguments->fourth;
	case CONTEXT_CREATE_5:
		return arguments->fifth;
	}
	return arguments->second;
}

PROBE("uprobe", context_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	struct call call = {
		.a = arguments.first, .b = device_argument(COOKIE_SHAPE(cookie), &arguments), .cookie = cookie};

	if (!begin_call(ctx, cookie, &id))
		return 0;
	keep_call(CALL_CONTEXT, &call);
	return 0;
}

PROBE("uretprobe", context_return)
{
	struct process_id id = this_process();
	struct call call;
	__u32 shape;

	if (!take_call(CALL_CONTEXT, &call) || !succeeded(ctx))
		return 0;
	shape = COOKIE_SHAPE(call.cookie);
	switch (shape) {
	case CONTEXT_RETAIN:
		retain_primary(&id, read_result(call.a), known_ordinal(call.b));
		break;
	case CONTEXT_CREATE_3:
	case CONTEXT_CREATE_4:
	case CONTEXT_CREATE_5:
		create_context(&id, read_result(call.a), known_ordinal(call.b));
		break;
	case CONTEXT_SET: /* as the driver: in the place of what is on top; NULL uncovers what lies below */
		pop_context();
		if (call.a)
			push_context(&id, call.a);
		break;
	case CONTEXT_PUSH:
		push_context(&id, call.a);
		break;
	case CONTEXT_POP:
		pop_context();
		break;
	case CONTEXT_DESTROY:
		if (current_context().context == call.a)
			pop_context();
		end_context(&id, call.a);
		end_captures(&id, call.a);
		break;
	case CONTEXT_RELEASE:
	case CONTEXT_RESET:
		release_primary(&id, call.a, shape == CONTEXT_RESET);
		break;
	case CONTEXT_UUID:
		learn_uuid(&id, call.a, call.b, 0);
		break;
	case CONTEXT_UUID_2:
		learn_uuid(&id, call.a, call.b, 1);
		break;
	case CONTEXT_GREEN:
		create_green(&id, read_result(call.a), known_ordinal(call.b));
		break;
	case CONTEXT_FROM_GREEN:
		name_green(&id, read_result(call.a), call.b);
		break;
	case CONTEXT_GREEN_DESTROY:
		end_green(&id, call.a);
		break;
	case CONTEXT_BUS_ID:
		learn_bus_id(&id, call.a, call.b);
		break;
	}
	return 0;
}
