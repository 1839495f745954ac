// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "context.bpf.c"
#include "copy.bpf.h"
#include "graph.bpf.h"
#include "memory.bpf.h"
#include "process.bpf.h"

#define NODE_PARAMETERS 16 /* in CUgraphNodeParams, after the type */
#define NODE_MEMCPY_DESCRIPTOR 16 /* in CUDA_MEMCPY_NODE_PARAMS, after flags and context */

struct kernel_node { /* the head of CUDA_KERNEL_NODE_PARAMS */
	__u64 function;
	__u32 grid[3];
	__u32 block[3];
};

struct allocation_node { /* the head of CUDA_MEM_ALLOC_NODE_PARAMS: of CUmemPoolProps its type and location */
	__u32 type, handle_types;
	struct location location;
	__u64 security, most_bytes, usage[7];
	__u64 access, access_count;
	__u64 bytes, address;
};

struct memset_node { /* CUDA_MEMSET_NODE_PARAMS */
	__u64 destination, pitch;
	__u32 value, element;
	__u64 width, height;
};

/* An empty one in the place of what had the handle before; NULL: there is no room. */
static __always_inline struct graph *new_graph(void *map, const struct process_id *id, __u64 handle)
{
	struct graph_key key = {.process = *id, .handle = handle};
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);
	struct graph *made;

	if (!blank || !put(map, &key, &blank->graph, LOST_NEW_GRAPH))
		return NULL;
	made = bpf_map_lookup_elem(map, &key);
	if (made)
		made->made_ns = bpf_ktime_get_ns();
	return made;
}

static __always_inline void forget_graph(const struct process_id *id, __u64 handle)
{
	struct graph_key key = {.process = *id, .handle = handle};

	drop(&graphs, &key, LOST_NEW_GRAPH);
}

static __always_inline void read_kernel_node(struct work *work, __u64 address)
{
	struct kernel_node node = {};

	if (bpf_probe_read_user(&node, sizeof(node), (void *)address))
		count_lost(LOST_USER_READ);
	add_kernel(work, grid_blocks(node.grid[0], node.grid[1], node.grid[2]),
		   node.block[0] * node.block[1] * node.block[2]);
}

static __always_inline void read_memset_node(struct work *work, __u64 address)
{
	struct memset_node node = {};

	if (bpf_probe_read_user(&node, sizeof(node), (void *)address))
		count_lost(LOST_USER_READ);
	else
		add_copy(work, COPY_MEMSET, product(product(node.width, node.element), node.height ? node.height : 1));
}

static __always_inline void read_memcpy_node(struct work *work, __u64 address)
{
	struct sized_copy copy = {};

	read_descriptor(&copy, address, &(struct descriptor){32, 48, 120, 136, 176, 3, 0});
	if (copy.source || copy.destination)
		copy.direction = unified_direction(copy.destination, copy.source);
	add_copy(work, copy.direction, copy.bytes);
}

/* What a node of that type does with these parameters; of a child graph they are its handle. */
static __always_inline void read_node(const struct process_id *id, struct work *work, __u32 type, __u64 parameters)
{
	int is_any = type == NODE_ANY;
	struct graph *child;

	if (is_any) {
		if (bpf_probe_read_user(&type, sizeof(type), (void *)parameters)) {
			count_lost(LOST_USER_READ);
			return;
		}
		parameters += NODE_PARAMETERS;
	}
	switch (type) {
	case NODE_KERNEL:
		read_kernel_node(work, parameters);
		break;
	case NODE_MEMCPY:
		read_memcpy_node(work, parameters + (is_any ? NODE_MEMCPY_DESCRIPTOR : 0));
		break;
	case NODE_MEMSET:
		read_memset_node(work, parameters);
		break;
	case NODE_CHILD:
		child = find_graph(id, is_any ? read_result(parameters) : parameters);
		if (child)
			add_work(work, &child->work);
		break;
	}
}

static __always_inline struct node *find_node(const struct process_id *id, __u64 exec, __u64 node)
{
	struct node_key key = {.process = *id, .exec = exec, .node = node};

	return bpf_map_lookup_elem(&nodes, &key);
}

static __always_inline struct node *own_node(const struct process_id *id, __u64 exec, __u64 node)
{
	struct node_key key = {.process = *id, .exec = exec, .node = node};
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);

	return blank ? find_or_add(&nodes, &key, &blank->node, LOST_NODE) : NULL;
}

static __always_inline __u32 added_type(__u32 shape)
{
	switch (shape) {
	case GRAPH_ADD_KERNEL:
		return NODE_KERNEL;
	case GRAPH_ADD_MEMCPY:
		return NODE_MEMCPY;
	case GRAPH_ADD_MEMSET:
		return NODE_MEMSET;
	case GRAPH_ADD_CHILD:
		return NODE_CHILD;
	}
	return NODE_ANY;
}

static __always_inline void add_allocation_node(const struct process_id *id, struct graph *graph, __u64 address)
{
	struct allocation_node node = {};

	if (bpf_probe_read_user(&node, sizeof(node), (void *)address))
		count_lost(LOST_USER_READ);
	else if (node.location.type == LOCATION_DEVICE)
		graph_allocates(id, graph, node.address, node.bytes, node.location.id);
}

static __always_inline void add_memory_node(const struct process_id *id, struct graph *graph, __u32 shape,
					    __u64 argument)
{
	__u32 type = shape == GRAPH_ADD_ALLOCATION ? NODE_ALLOCATION : shape == GRAPH_ADD_FREE ? NODE_FREE : NODE_ANY;

	if (added_type(shape) != NODE_ANY)
		return;
	if (type == NODE_ANY) {
		if (bpf_probe_read_user(&type, sizeof(type), (void *)argument))
			return; /* counted already */
		argument += NODE_PARAMETERS;
	}
	if (type == NODE_ALLOCATION)
		add_allocation_node(id, graph, argument);
	else if (type == NODE_FREE)
		graph_frees(id, graph, shape == GRAPH_ADD_FREE ? argument : read_result(argument));
}

/* An executable graph has its memory from its first launch on. No inline function: see count_copy. */
__noinline int hold_graph_memory(__u64 exec)
{
	struct process_id id = this_process();
	struct current current = current_context();
	struct allocation_key key = {.process = id, .space = SPACE_GRAPH, .pointer = exec};
	struct allocation allocation = {.context = current.context, .kind = MEMORY_GRAPH, .references = 1};
	struct graph *graph = find_graph(&id, exec);

	if (!graph || bpf_map_lookup_elem(&allocations, &key))
		return 0;
	allocation.bytes = graph->memory_most_bytes;
	allocation.device = graph->memory_device;
	allocation.at_ns = bpf_ktime_get_ns();
	add_new_allocation(
		&key, &allocation); /* not add_allocation(): the stack is full here, on Linux 6.1 to the last byte */
	return 0;
}

static __always_inline void release_graph_memory(const struct process_id *id, __u64 exec)
{
	struct allocation_key key = {.process = *id, .space = SPACE_GRAPH, .pointer = exec};
	struct allocation held;

	if (take_allocation(&key, &held))
		book_free(id, &held);
}

/* A graph that was made before the probes were there stays unknown: some of its nodes would be worse than none. */
static __always_inline void add_node(const struct process_id *id, __u32 shape, const struct call *call)
{
	struct graph *graph = find_graph(id, call->b);
	struct work work = {};
	struct node *node;

	if (!graph)
		return;
	add_memory_node(id, graph, shape, call->c);
	if (shape != GRAPH_ADD_ALLOCATION && shape != GRAPH_ADD_FREE)
		read_node(id, &work, added_type(shape), call->c);
	add_work(&graph->work, &work);
	node = own_node(id, 0, read_result(call->a));
	if (!node)
		return;
	node->work = work;
	node->graph = call->b;
	node->graph_ns = graph->made_ns;
	node->changed_ns = bpf_ktime_get_ns();
}

/* `made` holds what `source` holds, or is as unknown as that. */
static __always_inline void copy_graph(const struct process_id *id, __u64 made, __u64 source)
{
	struct graph *from = find_graph(id, source), *to;

	if (!from) {
		forget_graph(id, made); /* the handle may have been another graph's before */
		return;
	}
	to = new_graph(&graphs, id, made);
	if (!to)
		return;
	to->work = from->work;
	to->memory_bytes = from->memory_bytes;
	to->memory_most_bytes = from->memory_most_bytes;
	to->memory_device = from->memory_device;
	to->source = source;
	to->source_ns = from->made_ns;
}

static __always_inline void begin_capture(const struct process_id *id, __u64 stream, __u64 target)
{
	struct process *process = bpf_map_lookup_elem(&processes, id);
	struct graph *capture = process ? new_graph(&captures, id, stream) : NULL;

	if (!capture)
		return;
	capture->source = target;
	capture->source_ns = current_context().context; /* of the stream, as nearly always */
	__sync_fetch_and_add(&process->captures, 1);
}

static __always_inline void end_capture(const struct process_id *id, __u64 stream, __u64 made)
{
	struct graph_key key = {.process = *id, .handle = stream};
	struct process *process = bpf_map_lookup_elem(&processes, id);
	struct graph *capture = process ? capture_at(id, stream) : NULL;
	struct graph *graph = NULL;

	if (!capture)
		return; /* begun before the probes were there */
	__sync_fetch_and_add(&process->captures, -1);
	if (made)
		graph = capture->source ? find_graph(id, capture->source) : new_graph(&graphs, id, made);
	if (graph) {
		add_work(&graph->work, &capture->work);
		add_graph_memory(graph, capture);
		if (!capture->source)
			graph->made_ns = capture->made_ns; /* its allocations are those of the capture */
	}
	drop(&captures, &key, LOST_NEW_GRAPH);
}

PROBE("uprobe", graph_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	__u64 sixth = ARGUMENT_6(ctx);
	struct call call = {.a = arguments.first, .b = arguments.second, .c = arguments.fifth, .cookie = cookie};

	if (!begin_call(ctx, cookie, &id))
		return 0;
	if (COOKIE_SHAPE(cookie) == GRAPH_DESTROY) {
		release_graph_memory(&id, call.a);
		forget_graph(&id, call.a); /* before the call: afterwards another may have the same handle */
		return 0;
	}
	if (COOKIE_SHAPE(cookie) == GRAPH_ADD_NODE_6)
		call.c = sixth;
	call.stream = stream_of(ctx, cookie);
	keep_call(CALL_GRAPH, &call);
	return 0;
}

PROBE("uretprobe", graph_return)
{
	struct process_id id = this_process();
	int done = succeeded(ctx);
	struct call call;
	__u32 shape;

	if (!take_call(CALL_GRAPH, &call))
		return 0;
	shape = COOKIE_SHAPE(call.cookie);
	if (shape == CAPTURE_END) {
		end_capture(&id, call.stream, done ? read_result(call.b) : 0);
		return 0;
	}
	if (!done)
		return 0;
	switch (shape) {
	case GRAPH_CREATE:
		new_graph(&graphs, &id, read_result(call.a));
		break;
	case GRAPH_CLONE:
	case GRAPH_INSTANTIATE:
		copy_graph(&id, read_result(call.a), call.b);
		break;
	case GRAPH_UPDATE:
		copy_graph(&id, call.a, call.b);
		break;
	case CAPTURE_BEGIN:
		begin_capture(&id, call.stream, 0);
		break;
	case CAPTURE_BEGIN_TO:
		begin_capture(&id, call.stream, call.b);
		break;
	default:
		add_node(&id, shape, &call);
	}
	return 0;
}
