/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* A graph is its kernels in the order in which they were added; dependencies never point forward, so that order obeys them. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

struct CUgraph_st {
	uint32_t magic;
	size_t count, room;
	struct kernel *kernels;
};

struct CUgraphExec_st {
	uint32_t magic;
	size_t count;
	struct kernel *kernels;
};

CUresult graph_new(CUgraph *out)
{
	struct CUgraph_st *graph = calloc(1, sizeof(*graph));

	if (!graph)
		return CUDA_ERROR_OUT_OF_MEMORY;
	graph->magic = MAGIC_GRAPH;
	*out = graph;
	return CUDA_SUCCESS;
}

static CUgraphNode node_handle(size_t index)
{
	return (CUgraphNode)(uintptr_t)(index + 1);
}

CUresult graph_append(CUgraph graph, const struct kernel *kernel, CUgraphNode *node)
{
	if (graph->count == graph->room) {
		size_t room = graph->room ? graph->room * 2 : 16;
		struct kernel *larger = realloc(graph->kernels, room * sizeof(*larger));

		if (!larger)
			return CUDA_ERROR_OUT_OF_MEMORY;
		graph->kernels = larger;
		graph->room = room;
	}
	graph->kernels[graph->count] = *kernel;
	if (node)
		*node = node_handle(graph->count);
	graph->count++;
	return CUDA_SUCCESS;
}

void graph_free(CUgraph graph)
{
	graph->magic = 0;
	free(graph->kernels);
	free(graph);
}

static CUresult check(CUgraph graph)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return graph && graph->magic == MAGIC_GRAPH ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphCreate(CUgraph *graph, unsigned flags)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return graph && !flags ? graph_new(graph) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			 const CUDA_KERNEL_NODE_PARAMS *params)
{
	struct kernel kernel;
	CUresult result = check(graph);

	if (result != CUDA_SUCCESS)
		return result;
	if (!node || !params || (count && !dependencies))
		return CUDA_ERROR_INVALID_VALUE;
	result = kernel_of(params, &kernel);
	return result == CUDA_SUCCESS ? graph_append(graph, &kernel, node) : result;
}

API cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	CUresult result = check(graph);

	if (result != CUDA_SUCCESS)
		return result;
	if (!count)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; nodes && i < *count; i++)
		nodes[i] = i < graph->count ? node_handle(i) : NULL;
	if (!nodes || *count > graph->count)
		*count = graph->count;
	return CUDA_SUCCESS;
}

API cuGraphInstantiate(CUgraphExec *out, CUgraph graph, unsigned long long flags)
{
	struct CUgraphExec_st *exec;
	CUresult result = check(graph);

	(void)flags;
	if (result != CUDA_SUCCESS)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	exec = calloc(1, sizeof(*exec));
	if (exec)
		exec->kernels = malloc((graph->count + 1) * sizeof(*exec->kernels));
	if (!exec || !exec->kernels) {
		free(exec);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	exec->magic = MAGIC_EXEC;
	exec->count = graph->count;
	if (graph->count)
		memcpy(exec->kernels, graph->kernels, graph->count * sizeof(*exec->kernels));
	*out = exec;
	return CUDA_SUCCESS;
}

static CUresult launch(CUgraphExec exec, CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_for_work(handle, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!exec || exec->magic != MAGIC_EXEC)
		return CUDA_ERROR_INVALID_HANDLE;
	return kernels_submit(stream, exec->kernels, exec->count);
}

API2(cuGraphLaunch, cuGraphLaunch_ptsz, (CUgraphExec exec, CUstream stream), launch(exec, stream))

API cuGraphExecDestroy(CUgraphExec exec)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!exec || exec->magic != MAGIC_EXEC)
		return CUDA_ERROR_INVALID_HANDLE;
	exec->magic = 0;
	free(exec->kernels);
	free(exec);
	return CUDA_SUCCESS;
}

API cuGraphDestroy(CUgraph graph)
{
	CUresult result = check(graph);

	if (result == CUDA_SUCCESS)
		graph_free(graph);
	return result;
}
