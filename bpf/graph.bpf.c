// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "copy.bpf.h"
#include "graph.bpf.h"
#include "process.bpf.h"

/* CUgraphNodeParams: the type, and the parameters of that type at 16. */
#define NODE_PARAMETERS 16
#define NODE_KERNEL 0
#define NODE_MEMCPY 1
#define NODE_MEMSET 2
#define NODE_CHILD 4
#define NODE_MEMCPY_DESCRIPTOR 16 /* in CUDA_MEMCPY_NODE_PARAMS, after flags and context */

struct kernel_node { /* the head of CUDA_KERNEL_NODE_PARAMS */
	__u64 function;
	__u32 grid[3];
	__u32 block[3];
};

struct memset_node { /* CUDA_MEMSET_NODE_PARAMS */
	__u64 destination, pitch;
	__u32 value, element;
	__u64 width, height;
};

static __always_inline void put_graph(const struct process_id *id, __u64 handle, const struct graph *graph)
{
	struct graph_key key = {.process = *id, .handle = handle};

	bpf_map_update_elem(&graphs, &key, graph, BPF_ANY);
}

static __always_inline void forget_graph(const struct process_id *id, __u64 handle)
{
	struct graph_key key = {.process = *id, .handle = handle};

	bpf_map_delete_elem(&graphs, &key);
}

static __always_inline void add_kernel_node(struct graph *graph, __u64 address)
{
	struct kernel_node node = {};

	if (bpf_probe_read_user(&node, sizeof(node), (void *)address))
		count_lost(LOST_USER_READ);
	add_kernel(graph, (__u64)node.grid[0] * node.grid[1] * node.grid[2],
		   node.block[0] * node.block[1] * node.block[2]);
}

static __always_inline void add_child(const struct process_id *id, struct graph *graph, __u64 handle)
{
	struct graph *child = find_graph(id, handle);

	if (child)
		add_graph(graph, child);
}

static __always_inline void add_memset_node(struct graph *graph, __u64 address)
{
	struct memset_node node = {};

	if (bpf_probe_read_user(&node, sizeof(node), (void *)address))
		count_lost(LOST_USER_READ);
	else
		add_copy(graph, COPY_MEMSET, node.width * node.element * (node.height ? node.height : 1));
}

static __always_inline void add_memcpy_node(struct graph *graph, __u64 address)
{
	struct sized_copy copy = {};

	read_descriptor(&copy, address, &(struct descriptor){32, 48, 120, 136, 176, 3, 0});
	if (copy.source || copy.destination)
		copy.direction = unified_direction(copy.destination, copy.source);
	add_copy(graph, copy.direction, copy.bytes);
}

static __always_inline void add_any_node(const struct process_id *id, struct graph *graph, __u64 address)
{
	__u32 type = ~0u;

	if (bpf_probe_read_user(&type, sizeof(type), (void *)address))
		count_lost(LOST_USER_READ);
	if (type == NODE_KERNEL)
		add_kernel_node(graph, address + NODE_PARAMETERS);
	else if (type == NODE_MEMCPY)
		add_memcpy_node(graph, address + NODE_PARAMETERS + NODE_MEMCPY_DESCRIPTOR);
	else if (type == NODE_MEMSET)
		add_memset_node(graph, address + NODE_PARAMETERS);
	else if (type == NODE_CHILD)
		add_child(id, graph, read_result(address + NODE_PARAMETERS));
}

/* A graph that was made before the probes were there stays unknown: some of its nodes would be worse than none. */
static __always_inline void add_node(const struct process_id *id, __u32 shape, const struct call *call)
{
	struct graph *graph = find_graph(id, call->b);

	if (!graph)
		return;
	switch (shape) {
	case GRAPH_ADD_KERNEL:
		add_kernel_node(graph, call->c);
		break;
	case GRAPH_ADD_MEMCPY:
		add_memcpy_node(graph, call->c);
		break;
	case GRAPH_ADD_MEMSET:
		add_memset_node(graph, call->c);
		break;
	case GRAPH_ADD_CHILD:
		add_child(id, graph, call->c);
		break;
	default:
		add_any_node(id, graph, call->c);
	}
}

/* `made` holds what `source` holds, or is as unknown as that. */
static __always_inline void copy_graph(const struct process_id *id, __u64 made, __u64 source)
{
	struct graph_key key = {.process = *id, .handle = made};
	struct graph *graph = find_graph(id, source);
	struct graph copy;

	if (graph) {
		copy = *graph;
		bpf_map_update_elem(&graphs, &key, &copy, BPF_ANY);
	} else {
		forget_graph(id, made); /* the handle may have been another graph's before */
	}
}

static __always_inline void begin_capture(const struct process_id *id, __u64 stream, __u64 target)
{
	struct graph_key key = {.process = *id, .handle = stream};
	struct graph capture = {.target = target};
	struct thread *thread = own_thread();
	struct process *process = bpf_map_lookup_elem(&processes, id);

	if (!thread || !process || bpf_map_update_elem(&captures, &key, &capture, BPF_ANY))
		return;
	thread->capturing = 1;
	thread->captured_stream = stream;
	__sync_fetch_and_add(&process->captures, 1);
}

static __always_inline void end_capture(const struct process_id *id, __u64 stream, __u64 made)
{
	struct graph_key key = {.process = *id, .handle = stream};
	struct graph *capture = bpf_map_lookup_elem(&captures, &key);
	struct thread *thread = this_thread();
	struct process *process = bpf_map_lookup_elem(&processes, id);
	struct graph *target;
	struct graph copy;

	if (thread && thread->captured_stream == stream)
		thread->capturing = 0;
	if (!capture)
		return; /* begun before the probes were there */
	if (process)
		__sync_fetch_and_add(&process->captures, -1);
	copy = *capture;
	bpf_map_delete_elem(&captures, &key);
	if (!made)
		return;
	target = copy.target ? find_graph(id, copy.target) : NULL;
	if (target)
		add_graph(target, &copy);
	else if (!copy.target)
		put_graph(id, made, &copy);
}

SEC("uprobe")
int graph_enter(struct pt_regs *ctx)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	__u64 sixth = ARGUMENT_6(ctx);
	struct call call = {.a = arguments.first, .b = arguments.second, .c = arguments.fifth, .cookie = cookie};

	if (is_duplicate(ctx, cookie, &id, find_process(&id, cookie)))
		return 0;
	if (COOKIE_SHAPE(cookie) == GRAPH_DESTROY) {
		forget_graph(&id, call.a); /* before the call: afterwards another may have the same handle */
		return 0;
	}
	if (COOKIE_SHAPE(cookie) == GRAPH_ADD_NODE_6)
		call.c = sixth;
	keep_call(CALL_GRAPH, &call);
	return 0;
}

SEC("uretprobe")
int graph_return(struct pt_regs *ctx)
{
	struct process_id id = this_process();
	int done = succeeded(ctx);
	struct graph nothing = {};
	struct call call;
	__u32 shape;

	if (!take_call(CALL_GRAPH, &call))
		return 0;
	shape = COOKIE_SHAPE(call.cookie);
	if (shape == CAPTURE_END) {
		end_capture(&id, call.a, done ? read_result(call.b) : 0);
		return 0;
	}
	if (!done)
		return 0;
	switch (shape) {
	case GRAPH_CREATE:
		put_graph(&id, read_result(call.a), &nothing);
		break;
	case GRAPH_CLONE:
	case GRAPH_INSTANTIATE:
		copy_graph(&id, read_result(call.a), call.b);
		break;
	case GRAPH_UPDATE:
		copy_graph(&id, call.a, call.b);
		break;
	case CAPTURE_BEGIN:
		begin_capture(&id, call.a, 0);
		break;
	case CAPTURE_BEGIN_TO:
		begin_capture(&id, call.a, call.b);
		break;
	default:
		add_node(&id, shape, &call);
	}
	return 0;
}
