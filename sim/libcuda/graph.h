/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* What the files about graphs share: graph.c makes them, graph_exec.c runs them. */
#pragma once
#include "internal.h"

struct operation {
	CUgraphNodeType type;
	union {
		struct kernel kernel;
		struct {
			int kind;
			size_t bytes;
		} copy;
		struct {
			uint64_t address, bytes; /* no bytes: it frees what another node allocates there */
			int device;
		} memory;
	};
};

struct CUgraphNode_st {
	uint32_t magic;
	struct operation operation;
	CUgraph child; /* its own copy */
	CUgraph graph;
};

struct CUgraph_st {
	uint32_t magic;
	size_t count, room;
	size_t rewritten,
		end; /* nodes that a re-capture has rewritten, of those that it will; equal: none is going on */
	CUgraphNode *nodes;
};

/* CUDA_SUCCESS: it is a graph, and calls can work. */
CUresult graph_check(CUgraph graph);
CUgraphNodeParams kernel_params(const CUDA_KERNEL_NODE_PARAMS *params);
CUgraphNodeParams kernel_params_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *params);
CUgraphNodeParams copy_params(const CUDA_MEMCPY3D *params);
CUgraphNodeParams set_params(const CUDA_MEMSET_NODE_PARAMS *params);
CUgraphNodeParams child_params(CUgraph child);
/* What a node with these parameters does, with a copy of its child graph, if it has one. */
CUresult graph_operation_of(const CUgraphNodeParams *params, struct operation *operation, CUgraph *child);
