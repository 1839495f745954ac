/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What a graph does when it is launched: learned as its nodes are added or captured, taken over when it is instantiated.
 *
 * Captured is what any thread launches into a stream between its cuStreamBeginCapture and cuStreamEndCapture, or into
 * one that waited for an event of it: it becomes part of the graph, and does not run.
 */
#pragma once
#include "abi.h"
#include "copy.h"

enum graph_shape {
	GRAPH_CREATE = 1, /* (out graph, flags) */
	GRAPH_ADD_KERNEL, /* (out node, graph, dependencies, count, const CUDA_KERNEL_NODE_PARAMS *) */
	GRAPH_ADD_MEMCPY, /* (…, const CUDA_MEMCPY3D *, context) */
	GRAPH_ADD_MEMSET, /* (…, const CUDA_MEMSET_NODE_PARAMS *, context) */
	GRAPH_ADD_CHILD, /* (…, graph) */
	GRAPH_ADD_NODE, /* (…, CUgraphNodeParams *) */
	GRAPH_ADD_NODE_6, /* the same with edge data before the count */
	GRAPH_CLONE, /* (out graph, graph) */
	GRAPH_INSTANTIATE, /* (out graph exec, graph, …) */
	GRAPH_UPDATE, /* (graph exec, graph, …) */
	GRAPH_DESTROY, /* (graph or graph exec) */
	CAPTURE_BEGIN, /* (stream, …) */
	CAPTURE_BEGIN_TO, /* (stream, graph, …) */
	CAPTURE_END, /* (stream, out graph) */
	GRAPH_ADD_ALLOCATION, /* (…, CUDA_MEM_ALLOC_NODE_PARAMS *), which gets the address */
	GRAPH_ADD_FREE, /* (…, address) */
};

/* Of calls that change what a node does; the cookie's detail is the node's type. */
enum node_shape {
	NODE_OF_GRAPH = 1, /* (node, parameters) */
	NODE_OF_EXEC, /* (graph exec, node of the graph that it was made of, parameters) */
	NODE_ENABLE, /* (graph exec, node, whether it runs) */
	NODE_DESTROY, /* (node) */
};

/* CUgraphNodeType, and that the parameters begin with it. */
#define NODE_KERNEL 0
#define NODE_MEMCPY 1
#define NODE_MEMSET 2
#define NODE_CHILD 4
#define NODE_ALLOCATION 10
#define NODE_FREE 11
#define NODE_ANY 0xff

/* A CUgraph, a CUgraphExec, or the stream of a capture. */
struct graph_key {
	struct process_id process;
	__u64 handle;
};

/* What a launch of a node does, or of a whole graph. */
struct work {
	__u64 blocks;
	__u64 waves; /* of blocks, as in struct launch_value */
	__u64 wave_sms;
	__u64 bytes[COPY_LOCAL];
	__u32 copies[COPY_LOCAL];
	__u32 kernels;
	__u32 threads_per_block; /* of the latest kernel */
	__u32 _pad;
};

struct graph {
	struct work work;
	__u64 made_ns; /* tells it from a graph that has its handle later; of an executable one, when it was updated last */
	__u64 source; /* of an executable graph: what it was made of, or updated to; of a capture: the graph that it adds to */
	__u64 source_ns; /* of a capture: the context that it was begun in */
	__u64 memory_bytes; /* that its nodes have allocated and not freed up to the last one; MEMORY_GRAPH is their most */
	__u64 memory_most_bytes;
	__u32 memory_device; /* ordinal */
	__u32 _pad;
};

/* What a node allocates, by its address in the place of the handle. */
struct graph_memory {
	__u64 bytes;
	__u64 graph_ns; /* made_ns of the graph that it is in */
};

/* Nodes are known that were added one by one. Those that were captured, cloned or are in a child graph are not. */
struct node_key {
	struct process_id process;
	__u64 exec; /* 0: what it does in its graph */
	__u64 node;
};

struct node {
	struct work work;
	__u64 graph;
	__u64 graph_ns; /* its made_ns */
	__u64 changed_ns;
	__u64 is_off; /* switched off in the executable graph, whose sum lacks it */
};
