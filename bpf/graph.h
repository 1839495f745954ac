/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What a graph does when it is launched: learned as its nodes are added or captured, taken over when it is instantiated.
 *
 * Captured is what a thread launches between its own cuStreamBeginCapture and cuStreamEndCapture, and what any thread
 * launches into the stream that is being captured: it becomes part of the graph, and does not run.
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
};

/* A CUgraph, a CUgraphExec, or the stream of a capture. */
struct graph_key {
	struct process_id process;
	__u64 handle;
};

struct graph {
	__u64 kernels;
	__u64 blocks;
	__u64 waves; /* of blocks, as in struct launch_value */
	__u64 wave_sms;
	__u64 target; /* of a capture into a graph: that one */
	__u32 threads_per_block; /* of the latest kernel */
	__u32 _pad;
	__u64 bytes[COPY_DIRECTIONS];
	__u64 copies[COPY_DIRECTIONS];
};
