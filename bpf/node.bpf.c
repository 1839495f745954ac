// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * Nodes that change what they do: the sum of their graph, or of the executable graph that they are changed in, follows.
 * Of a node that is not known, what it did cannot be taken off: the sum stays as it is, and LOST_NODE counts it.
 */
#pragma once
#include "graph.bpf.c"

static __always_inline void change_in_graph(const struct process_id *id, const struct call *call)
{
	struct node *node = find_node(id, 0, call->b);
	struct graph *graph = node ? find_graph(id, node->graph) : NULL;
	struct work work = {};

	if (!graph || graph->made_ns != node->graph_ns) {
		count_lost(LOST_NODE);
		return;
	}
	read_node(id, &work, COOKIE_DETAIL(call->cookie), call->c);
	remove_work(&graph->work, &node->work);
	add_work(&graph->work, &work);
	node->work = work;
	node->changed_ns = bpf_ktime_get_ns();
}

/* The node as the executable graph has it: changed there, or as it was in the graph when that was instantiated. */
static __always_inline struct node *node_in_exec(const struct process_id *id, const struct graph *exec,
						 const struct call *call)
{
	struct node *own = find_node(id, call->a, call->b), *original;

	if (own && own->changed_ns >= exec->made_ns)
		return own;
	original = find_node(id, 0, call->b);
	if (!original || original->graph != exec->source || original->graph_ns != exec->source_ns ||
	    original->changed_ns > exec->made_ns) {
		count_lost(LOST_NODE);
		return NULL;
	}
	own = own_node(id, call->a, call->b);
	if (!own)
		return NULL;
	own->work = original->work;
	own->changed_ns = bpf_ktime_get_ns();
	own->is_off = 0;
	return own;
}

static __always_inline void change_in_exec(const struct process_id *id, const struct call *call)
{
	struct graph *exec = find_graph(id, call->a);
	struct node *node = exec ? node_in_exec(id, exec, call) : NULL;
	struct work work = {};

	if (!node)
		return; /* of a graph that is not known its launches count as lost */
	read_node(id, &work, COOKIE_DETAIL(call->cookie), call->c);
	if (!node->is_off) {
		remove_work(&exec->work, &node->work);
		add_work(&exec->work, &work);
	}
	node->work = work;
}

static __always_inline void switch_in_exec(const struct process_id *id, const struct call *call)
{
	struct graph *exec = find_graph(id, call->a);
	struct node *node = exec ? node_in_exec(id, exec, call) : NULL;
	int off = (__u32)call->c == 0;

	if (!node || node->is_off == off)
		return;
	node->is_off = off;
	if (off)
		remove_work(&exec->work, &node->work);
	else
		add_work(&exec->work, &node->work);
}

/* Before the call: afterwards another node may have the same handle. */
static __always_inline void destroy_node(const struct process_id *id, __u64 handle)
{
	struct node_key key = {.process = *id, .node = handle};
	struct node *node = find_node(id, 0, handle);
	struct graph *graph = node ? find_graph(id, node->graph) : NULL;

	if (graph && graph->made_ns == node->graph_ns)
		remove_work(&graph->work, &node->work);
	else
		count_lost(LOST_NODE);
	drop(&nodes, &key, LOST_NODE);
}

PROBE("uprobe", node_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	struct call call = {.a = arguments.first, .b = arguments.second, .c = arguments.third, .cookie = cookie};

	if (!begin_call(ctx, cookie, &id))
		return 0;
	switch (COOKIE_SHAPE(cookie)) {
	case NODE_DESTROY:
		destroy_node(&id, call.a);
		return 0;
	case NODE_OF_GRAPH:
		call.c = call.b;
		call.b = call.a;
	}
	keep_call(CALL_GRAPH, &call);
	return 0;
}

PROBE("uretprobe", node_return)
{
	struct process_id id = this_process();
	struct call call;

	if (!take_call(CALL_GRAPH, &call) || !succeeded(ctx))
		return 0;
	switch (COOKIE_SHAPE(call.cookie)) {
	case NODE_OF_GRAPH:
		change_in_graph(&id, &call);
		break;
	case NODE_OF_EXEC:
		change_in_exec(&id, &call);
		break;
	case NODE_ENABLE:
		switch_in_exec(&id, &call);
		break;
	}
	return 0;
}
