/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* A graph is its nodes in the order in which they were added; dependencies never point forward, so that order obeys them. */
#include "graph.h"

#include <stdlib.h>
#include <string.h>

static pthread_mutex_t graph_lock = PTHREAD_MUTEX_INITIALIZER; /* of appending */

/* ---- making and ending ---- */

CUresult graph_new(CUgraph *out)
{
	struct CUgraph_st *graph = calloc(1, sizeof(*graph));

	if (!graph)
		return CUDA_ERROR_OUT_OF_MEMORY;
	graph->magic = MAGIC_GRAPH;
	*out = graph;
	return CUDA_SUCCESS;
}

static void node_free(CUgraphNode node)
{
	if (node->child)
		graph_free(node->child);
	node->magic = 0;
	free(node);
}

void graph_free(CUgraph graph)
{
	for (size_t i = 0; i < graph->count; i++)
		node_free(graph->nodes[i]);
	graph->magic = 0;
	free(graph->nodes);
	free(graph);
}

/* With graph_lock. */
static bool make_room(CUgraph graph)
{
	size_t room = graph->room ? graph->room * 2 : 16;
	CUgraphNode *larger;

	if (graph->count < graph->room)
		return true;
	larger = realloc(graph->nodes, room * sizeof(*larger));
	if (!larger)
		return false;
	graph->nodes = larger;
	graph->room = room;
	return true;
}

/* A re-capture makes the same nodes in the same order, which may do more or less than before. */
static CUresult rewrite(CUgraph graph, struct operation operation)
{
	CUgraphNode node = graph->nodes[graph->rewritten];

	if (node->operation.type != operation.type)
		return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
	node->operation = operation;
	graph->rewritten++;
	return CUDA_SUCCESS;
}

void graph_begin_rewriting(CUgraph graph)
{
	graph->rewritten = 0;
	graph->end = graph->count;
}

bool graph_end_rewriting(CUgraph graph)
{
	bool complete = graph->rewritten == graph->end;

	graph->rewritten = graph->end = 0;
	return complete;
}

static CUresult append(CUgraph graph, struct operation operation, CUgraph child, CUgraphNode *out)
{
	struct CUgraphNode_st *node;
	bool roomy = false;

	if (graph->rewritten < graph->end)
		return rewrite(graph, operation);
	node = malloc(sizeof(*node));
	if (node) {
		*node = (struct CUgraphNode_st){MAGIC_NODE, operation, child, graph};
		pthread_mutex_lock(&graph_lock);
		roomy = make_room(graph);
		if (roomy)
			graph->nodes[graph->count++] = node;
		pthread_mutex_unlock(&graph_lock);
	}
	if (!roomy) {
		free(node);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	if (out)
		*out = node;
	return CUDA_SUCCESS;
}

CUresult graph_append_kernel(CUgraph graph, const struct kernel *kernel, CUgraphNode *node)
{
	return append(graph, (struct operation){CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *kernel}, NULL, node);
}

CUresult graph_append_copy(CUgraph graph, int kind, size_t bytes, CUgraphNode *node)
{
	struct operation copy = {.type = kind == COPY_SET ? CU_GRAPH_NODE_TYPE_MEMSET : CU_GRAPH_NODE_TYPE_MEMCPY};

	copy.copy.kind = kind;
	copy.copy.bytes = bytes;
	return append(graph, copy, NULL, node);
}

/* ---- memory ---- */

#define GRAPH_GRANULARITY (2ull << 20)

static _Atomic uint64_t next_graph_address = FIRST_GRAPH_ADDRESS;

bool is_graph_address(CUdeviceptr pointer)
{
	return pointer >= FIRST_GRAPH_ADDRESS && pointer < atomic_load(&next_graph_address);
}

CUresult graph_append_allocation(CUgraph graph, CUmemLocation location, size_t bytes, CUdeviceptr *pointer,
				 CUgraphNode *node)
{
	struct operation operation = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
	uint64_t room = (bytes + GRAPH_GRANULARITY - 1) / GRAPH_GRANULARITY * GRAPH_GRANULARITY;
	CUresult result;

	if (!pointer || !bytes || location.type != CU_MEM_LOCATION_TYPE_DEVICE)
		return CUDA_ERROR_INVALID_VALUE;
	result = ready_ordinal(location.id);
	if (result != CUDA_SUCCESS)
		return result;
	if (room > END_DEVICE_ADDRESS - atomic_load(&next_graph_address))
		return CUDA_ERROR_OUT_OF_MEMORY;
	operation.memory.address = atomic_fetch_add(&next_graph_address, room);
	operation.memory.bytes = bytes;
	operation.memory.device = location.id;
	result = append(graph, operation, NULL, node);
	if (result == CUDA_SUCCESS)
		*pointer = operation.memory.address;
	return result;
}

CUresult graph_append_free(CUgraph graph, CUdeviceptr pointer, CUgraphNode *node)
{
	struct operation operation = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE};

	operation.memory.address = pointer;
	return is_graph_address(pointer) ? append(graph, operation, NULL, node) : CUDA_ERROR_INVALID_VALUE;
}

size_t graph_last(CUgraph graph, const CUgraphNode **nodes)
{
	if (nodes)
		*nodes = graph->count ? &graph->nodes[graph->count - 1] : NULL;
	return graph->count ? 1 : 0;
}

static CUresult copy_graph(CUgraph *out, CUgraph graph)
{
	CUgraph copy = NULL;
	CUresult result = graph_new(&copy);

	for (size_t i = 0; i < graph->count && result == CUDA_SUCCESS; i++) {
		CUgraph child = NULL;

		if (graph->nodes[i]->child)
			result = copy_graph(&child, graph->nodes[i]->child);
		if (result == CUDA_SUCCESS)
			result = append(copy, graph->nodes[i]->operation, child, NULL);
		if (result != CUDA_SUCCESS && child)
			graph_free(child);
	}
	if (result == CUDA_SUCCESS)
		*out = copy;
	else if (copy)
		graph_free(copy);
	return result;
}

CUresult graph_check(CUgraph graph)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return graph && graph->magic == MAGIC_GRAPH ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Dependencies say only what the order of adding says already; they have to be nodes all the same. */
static CUresult check_adding(const CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	CUresult result = graph_check(graph);

	if (result == CUDA_SUCCESS && (!node || (count && !dependencies)))
		result = CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++)
		if (!dependencies[i] || dependencies[i]->magic != MAGIC_NODE)
			result = CUDA_ERROR_INVALID_VALUE;
	return result;
}

API cuGraphCreate(CUgraph *graph, unsigned flags)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return graph && !flags ? graph_new(graph) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphClone(CUgraph *out, CUgraph graph)
{
	CUresult result = graph_check(graph);

	if (result != CUDA_SUCCESS)
		return result;
	return out ? copy_graph(out, graph) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphDestroy(CUgraph graph)
{
	CUresult result = graph_check(graph);

	if (result == CUDA_SUCCESS)
		graph_free(graph);
	return result;
}

API cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	CUresult result = graph_check(graph);

	if (result != CUDA_SUCCESS)
		return result;
	if (!count)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; nodes && i < *count; i++)
		nodes[i] = i < graph->count ? graph->nodes[i] : NULL;
	if (!nodes || *count > graph->count)
		*count = graph->count;
	return CUDA_SUCCESS;
}

/* ---- what a node does ---- */

static CUresult kernel_operation(const CUDA_KERNEL_NODE_PARAMS *params, struct operation *to)
{
	to->type = CU_GRAPH_NODE_TYPE_KERNEL;
	return kernel_of(params, &to->kernel);
}

static CUresult copy_operation(const CUDA_MEMCPY3D *params, struct operation *to)
{
	to->type = CU_GRAPH_NODE_TYPE_MEMCPY;
	return copy_shape(params, &to->copy.kind, &to->copy.bytes);
}

static CUresult set_operation(const CUDA_MEMSET_NODE_PARAMS *p, struct operation *to)
{
	to->type = CU_GRAPH_NODE_TYPE_MEMSET;
	to->copy.kind = COPY_SET;
	return !is_device_address(p->dst) || (p->elementSize != 1 && p->elementSize != 2 && p->elementSize != 4) ||
			       __builtin_mul_overflow(p->width, p->height, &to->copy.bytes) ||
			       __builtin_mul_overflow(to->copy.bytes, p->elementSize, &to->copy.bytes)
		       ? CUDA_ERROR_INVALID_VALUE
		       : CUDA_SUCCESS;
}

static CUresult child_operation(CUgraph child, struct operation *to, CUgraph *copy)
{
	CUresult result = graph_check(child);

	to->type = CU_GRAPH_NODE_TYPE_GRAPH;
	return result == CUDA_SUCCESS ? copy_graph(copy, child) : result;
}

CUresult graph_operation_of(const CUgraphNodeParams *p, struct operation *to, CUgraph *child)
{
	*child = NULL;
	to->type = p->type;
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		return kernel_operation(&p->kernel, to);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return copy_operation(&p->memcpy.copyParams, to);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return set_operation(&(CUDA_MEMSET_NODE_PARAMS){p->memset.dst, p->memset.pitch, p->memset.value,
								p->memset.elementSize, p->memset.width,
								p->memset.height},
				     to);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return child_operation(p->graph.graph, to, child);
	case CU_GRAPH_NODE_TYPE_EMPTY:
		return CUDA_SUCCESS;
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
}

CUgraphNodeParams kernel_params(const CUDA_KERNEL_NODE_PARAMS *params)
{
	return (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *params};
}

CUgraphNodeParams kernel_params_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	return kernel_params(&(CUDA_KERNEL_NODE_PARAMS){p->func, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX,
							p->blockDimY, p->blockDimZ, p->sharedMemBytes, p->kernelParams,
							p->extra, NULL, NULL});
}

CUgraphNodeParams copy_params(const CUDA_MEMCPY3D *params)
{
	return (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_MEMCPY, .memcpy.copyParams = *params};
}

CUgraphNodeParams set_params(const CUDA_MEMSET_NODE_PARAMS *p)
{
	return (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_MEMSET,
				   .memset = {p->dst, p->pitch, p->value, p->elementSize, p->width, p->height, NULL}};
}

CUgraphNodeParams child_params(CUgraph child)
{
	return (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_GRAPH, .graph.graph = child};
}

/* ---- adding ---- */

static CUresult add(CUgraph graph, CUgraphNodeParams params, CUgraphNode *node)
{
	struct operation operation;
	CUgraph child;
	CUresult result = graph_operation_of(&params, &operation, &child);

	if (result == CUDA_SUCCESS)
		result = append(graph, operation, child, node);
	if (result != CUDA_SUCCESS && child)
		graph_free(child);
	return result;
}

static CUresult add_allocation(CUgraph graph, CUDA_MEM_ALLOC_NODE_PARAMS *p, CUgraphNode *node)
{
	if (p->poolProps.allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
		return CUDA_ERROR_INVALID_VALUE;
	return graph_append_allocation(graph, p->poolProps.location, p->bytesize, &p->dptr, node);
}

static CUresult add_any(CUgraph graph, CUgraphNodeParams *params, CUgraphNode *node)
{
	if (params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
		return add_allocation(graph, &params->alloc, node);
	if (params->type == CU_GRAPH_NODE_TYPE_MEM_FREE)
		return graph_append_free(graph, params->free.dptr, node);
	return add(graph, *params, node);
}

#define ADD(params, call)                                                                                              \
	CUresult result = check_adding(node, graph, dependencies, count);                                              \
                                                                                                                       \
	if (result != CUDA_SUCCESS)                                                                                    \
		return result;                                                                                         \
	return (params) ? (call) : CUDA_ERROR_INVALID_VALUE

API cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			 const CUDA_KERNEL_NODE_PARAMS *params)
{
	ADD(params, add(graph, kernel_params(params), node));
}

API cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			 const CUDA_MEMCPY3D *params, CUcontext context)
{
	(void)context;
	ADD(params, add(graph, copy_params(params), node));
}

API cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			 const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context)
{
	(void)context;
	ADD(params, add(graph, set_params(params), node));
}

API cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	ADD(true, add(graph, (CUgraphNodeParams){.type = CU_GRAPH_NODE_TYPE_EMPTY}, node));
}

API cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			     CUgraph child)
{
	ADD(child, add(graph, child_params(child), node));
}

API cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			   CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
	ADD(params, add_allocation(graph, params, node));
}

API cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			  CUdeviceptr pointer)
{
	ADD(pointer, graph_append_free(graph, pointer, node));
}

API cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
		   CUgraphNodeParams *params)
{
	ADD(params, add_any(graph, params, node));
}

API cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges,
		      size_t count, CUgraphNodeParams *params)
{
	(void)edges;
	ADD(params, add_any(graph, params, node));
}

/* ---- changing ---- */

static CUresult check_node(CUgraphNode node)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return node && node->magic == MAGIC_NODE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* A node stays of the type that it is. */
static CUresult change(CUgraphNode node, CUgraphNodeParams params)
{
	struct operation operation;
	CUresult result = check_node(node);
	CUgraph child;

	if (result == CUDA_SUCCESS && (node->operation.type != params.type || params.type == CU_GRAPH_NODE_TYPE_GRAPH))
		result = CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS)
		result = graph_operation_of(&params, &operation, &child);
	if (result == CUDA_SUCCESS)
		node->operation = operation;
	return result;
}

API cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
	return params ? change(node, kernel_params(params)) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *params)
{
	return params ? change(node, copy_params(params)) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params)
{
	return params ? change(node, set_params(params)) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *params)
{
	return params ? change(node, *params) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphDestroyNode(CUgraphNode node)
{
	CUresult result = check_node(node);
	CUgraph graph;
	size_t i = 0;

	if (result != CUDA_SUCCESS)
		return result;
	graph = node->graph;
	pthread_mutex_lock(&graph_lock);
	while (graph->nodes[i] != node)
		i++;
	memmove(&graph->nodes[i], &graph->nodes[i + 1], (--graph->count - i) * sizeof(*graph->nodes));
	pthread_mutex_unlock(&graph_lock);
	node_free(node);
	return CUDA_SUCCESS;
}

/* ---- the forms of before CUDA 12 ---- */

#include "exact_names.h"

API cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			 const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
	ADD(params, add(graph, kernel_params_v1(params), node));
}

API cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
	return params ? change(node, kernel_params_v1(params)) : CUDA_ERROR_INVALID_VALUE;
}
