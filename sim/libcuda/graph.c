/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* A graph is its nodes in the order in which they were added; dependencies never point forward, so that order obeys them. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

struct operation {
	CUgraphNodeType type;
	union {
		struct kernel kernel;
		struct {
			int kind;
			size_t bytes;
		} copy;
	};
};

struct CUgraphNode_st {
	uint32_t magic;
	struct operation operation;
	CUgraph child;
};

struct CUgraph_st {
	uint32_t magic;
	size_t count, room;
	CUgraphNode *nodes;
};

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

void graph_free(CUgraph graph)
{
	for (size_t i = 0; i < graph->count; i++) {
		if (graph->nodes[i]->child)
			graph_free(graph->nodes[i]->child);
		graph->nodes[i]->magic = 0;
		free(graph->nodes[i]);
	}
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

static CUresult append(CUgraph graph, struct operation operation, CUgraph child, CUgraphNode *out)
{
	struct CUgraphNode_st *node = malloc(sizeof(*node));
	bool roomy = false;

	if (node) {
		*node = (struct CUgraphNode_st){MAGIC_NODE, operation, child};
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

static CUresult check(CUgraph graph)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return graph && graph->magic == MAGIC_GRAPH ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Dependencies say only what the order of adding says already; they have to be nodes all the same. */
static CUresult check_adding(const CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	CUresult result = check(graph);

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
	CUresult result = check(graph);

	if (result != CUDA_SUCCESS)
		return result;
	return out ? copy_graph(out, graph) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphDestroy(CUgraph graph)
{
	CUresult result = check(graph);

	if (result == CUDA_SUCCESS)
		graph_free(graph);
	return result;
}

API cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
	CUresult result = check(graph);

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

/* ---- adding ---- */

static CUresult add_kernel(CUgraph graph, const CUDA_KERNEL_NODE_PARAMS *params, CUgraphNode *node)
{
	struct kernel kernel;
	CUresult result = kernel_of(params, &kernel);

	return result == CUDA_SUCCESS ? graph_append_kernel(graph, &kernel, node) : result;
}

static CUresult add_copy(CUgraph graph, const CUDA_MEMCPY3D *params, CUgraphNode *node)
{
	size_t bytes;
	int kind;
	CUresult result = copy_shape(params, &kind, &bytes);

	return result == CUDA_SUCCESS ? graph_append_copy(graph, kind, bytes, node) : result;
}

static CUresult add_set(CUgraph graph, const CUDA_MEMSET_NODE_PARAMS *p, CUgraphNode *node)
{
	size_t bytes;

	if (!is_device_address(p->dst) || (p->elementSize != 1 && p->elementSize != 2 && p->elementSize != 4) ||
	    __builtin_mul_overflow(p->width, p->height, &bytes) ||
	    __builtin_mul_overflow(bytes, p->elementSize, &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	return graph_append_copy(graph, COPY_SET, bytes, node);
}

static CUresult add_child(CUgraph graph, CUgraph child, CUgraphNode *node)
{
	CUgraph copy;
	CUresult result = check(child);

	if (result == CUDA_SUCCESS)
		result = copy_graph(&copy, child);
	if (result != CUDA_SUCCESS)
		return result;
	result = append(graph, (struct operation){.type = CU_GRAPH_NODE_TYPE_GRAPH}, copy, node);
	if (result != CUDA_SUCCESS)
		graph_free(copy);
	return result;
}

static CUresult add_empty(CUgraph graph, CUgraphNode *node)
{
	return append(graph, (struct operation){.type = CU_GRAPH_NODE_TYPE_EMPTY}, NULL, node);
}

static CUresult add(CUgraph graph, const CUgraphNodeParams *p, CUgraphNode *node)
{
	switch (p->type) {
	case CU_GRAPH_NODE_TYPE_KERNEL:
		return add_kernel(graph, &p->kernel, node);
	case CU_GRAPH_NODE_TYPE_MEMCPY:
		return add_copy(graph, &p->memcpy.copyParams, node);
	case CU_GRAPH_NODE_TYPE_MEMSET:
		return add_set(graph,
			       &(CUDA_MEMSET_NODE_PARAMS){p->memset.dst, p->memset.pitch, p->memset.value,
							  p->memset.elementSize, p->memset.width, p->memset.height},
			       node);
	case CU_GRAPH_NODE_TYPE_GRAPH:
		return add_child(graph, p->graph.graph, node);
	case CU_GRAPH_NODE_TYPE_EMPTY:
		return add_empty(graph, node);
	default:
		return CUDA_ERROR_NOT_SUPPORTED;
	}
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
	ADD(params, add_kernel(graph, params, node));
}

API cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			 const CUDA_MEMCPY3D *params, CUcontext context)
{
	(void)context;
	ADD(params, add_copy(graph, params, node));
}

API cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			 const CUDA_MEMSET_NODE_PARAMS *params, CUcontext context)
{
	(void)context;
	ADD(params, add_set(graph, params, node));
}

API cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count)
{
	ADD(true, add_empty(graph, node));
}

API cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			     CUgraph child)
{
	ADD(child, add_child(graph, child, node));
}

API cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
		   CUgraphNodeParams *params)
{
	ADD(params, add(graph, params, node));
}

API cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges,
		      size_t count, CUgraphNodeParams *params)
{
	(void)edges;
	ADD(params, add(graph, params, node));
}

/* ---- what is launched: all operations, those of child graphs at their places ---- */

struct CUgraphExec_st {
	uint32_t magic;
	size_t count;
	struct operation *operations;
};

static size_t flatten(CUgraph graph, struct operation *to)
{
	size_t count = 0;

	for (size_t i = 0; i < graph->count; i++) {
		const struct CUgraphNode_st *node = graph->nodes[i];

		if (node->child)
			count += flatten(node->child, to ? to + count : NULL);
		else if (node->operation.type != CU_GRAPH_NODE_TYPE_EMPTY && to)
			to[count++] = node->operation;
		else if (node->operation.type != CU_GRAPH_NODE_TYPE_EMPTY)
			count++;
	}
	return count;
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph)
{
	struct CUgraphExec_st *exec;
	CUresult result = check(graph);

	if (result != CUDA_SUCCESS)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	exec = calloc(1, sizeof(*exec));
	if (exec)
		exec->operations = malloc((flatten(graph, NULL) + 1) * sizeof(*exec->operations));
	if (!exec || !exec->operations) {
		free(exec);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	exec->magic = MAGIC_EXEC;
	exec->count = flatten(graph, exec->operations);
	*out = exec;
	return CUDA_SUCCESS;
}

static CUresult check_exec(CUgraphExec exec)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	return exec && exec->magic == MAGIC_EXEC ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* The nodes stay what they were; only what they do may change. */
static CUgraphExecUpdateResult update(CUgraphExec exec, CUgraph graph)
{
	struct operation *now;

	if (flatten(graph, NULL) != exec->count)
		return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
	now = malloc((exec->count + 1) * sizeof(*now));
	if (!now)
		return CU_GRAPH_EXEC_UPDATE_ERROR;
	flatten(graph, now);
	for (size_t i = 0; i < exec->count; i++)
		if (now[i].type != exec->operations[i].type) {
			free(now);
			return CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
		}
	free(exec->operations);
	exec->operations = now;
	return CU_GRAPH_EXEC_UPDATE_SUCCESS;
}

static CUresult update_checked(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResult *what)
{
	CUresult result = check_exec(exec);

	if (result == CUDA_SUCCESS)
		result = what ? check(graph) : CUDA_ERROR_INVALID_VALUE;
	if (result != CUDA_SUCCESS)
		return result;
	*what = update(exec, graph);
	return *what == CU_GRAPH_EXEC_UPDATE_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

static CUresult submit(struct CUstream_st *stream, const struct operation *o, bool *first)
{
	CUresult result;

	if (o->type != CU_GRAPH_NODE_TYPE_KERNEL) {
		uint64_t arguments[4] = {(uint64_t)o->copy.kind, o->copy.bytes};

		return o->copy.kind == NO_COPY || !o->copy.bytes ? CUDA_SUCCESS
								 : ring_operation(stream, CMD_COPY, arguments, NULL);
	}
	result = kernel_submit(stream, &o->kernel, *first);
	*first = false;
	return result;
}

static CUresult launch(CUgraphExec exec, CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_for_work(handle, &stream);
	bool first = true;

	if (result == CUDA_SUCCESS)
		result = check_exec(exec);
	if (result == CUDA_SUCCESS)
		result = call_begin();
	if (result != CUDA_SUCCESS)
		return result;
	for (size_t i = 0; result == CUDA_SUCCESS && i < exec->count; i++)
		result = submit(stream, &exec->operations[i], &first);
	call_end();
	return result;
}

/* There is nothing to upload to. */
static CUresult upload(CUgraphExec exec, CUstream handle)
{
	struct CUstream_st *stream;
	CUresult result = stream_for_work(handle, &stream);

	return result == CUDA_SUCCESS ? check_exec(exec) : result;
}

static CUresult instantiate_with(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
	CUresult result = params ? instantiate(exec, graph) : CUDA_ERROR_INVALID_VALUE;

	if (params) {
		params->hErrNode_out = NULL;
		params->result_out =
			result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
	}
	return result;
}

API cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	(void)flags;
	return instantiate(exec, graph);
}

API2(cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz,
     (CUgraphExec * exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params), instantiate_with(exec, graph, params))
API2(cuGraphUpload, cuGraphUpload_ptsz, (CUgraphExec exec, CUstream stream), upload(exec, stream))
API2(cuGraphLaunch, cuGraphLaunch_ptsz, (CUgraphExec exec, CUstream stream), launch(exec, stream))

API cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
	if (!info)
		return CUDA_ERROR_INVALID_VALUE;
	info->errorNode = info->errorFromNode = NULL;
	return update_checked(exec, graph, &info->result);
}

API cuGraphExecDestroy(CUgraphExec exec)
{
	CUresult result = check_exec(exec);

	if (result != CUDA_SUCCESS)
		return result;
	exec->magic = 0;
	free(exec->operations);
	free(exec);
	return CUDA_SUCCESS;
}

/* ---- the forms of before CUDA 12 ---- */

#include "exact_names.h"

API cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			 const CUDA_KERNEL_NODE_PARAMS_v1 *p)
{
	ADD(p, add_kernel(graph,
			  &(CUDA_KERNEL_NODE_PARAMS){p->func, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX,
						     p->blockDimY, p->blockDimZ, p->sharedMemBytes, p->kernelParams,
						     p->extra, NULL, NULL},
			  node));
}

static CUresult instantiate_logged(CUgraphExec *exec, CUgraph graph, CUgraphNode *failed, char *log, size_t room)
{
	if (failed)
		*failed = NULL;
	if (log && room)
		log[0] = 0;
	return instantiate(exec, graph);
}

API cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *failed, char *log, size_t room)
{
	return instantiate_logged(exec, graph, failed, log, room);
}

API cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *failed, char *log, size_t room)
{
	return instantiate_logged(exec, graph, failed, log, room);
}

API cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *failed, CUgraphExecUpdateResult *what)
{
	if (failed)
		*failed = NULL;
	return update_checked(exec, graph, what);
}
