/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* What is launched: all operations of a graph, those of child graphs at their places. */
#include "graph.h"

#include <stdlib.h>

/* ---- what is launched: all operations, those of child graphs at their places ---- */

struct entry {
	struct operation operation;
	CUgraphNode node, top; /* of the graph that was instantiated: itself, and the child graph node that it is in */
	bool disabled;
};

struct CUgraphExec_st {
	uint32_t magic;
	size_t count;
	struct entry *entries;
	uint64_t memory; /* what it has for its nodes from its first launch on; 0: not yet */
	int device;
	size_t bytes;
};

static pthread_mutex_t exec_lock = PTHREAD_MUTEX_INITIALIZER; /* of what executable graphs have */
static struct {
	cuuint64_t now, high;
} reserved[MAX_DEVICES]; /* by ordinal */

/* ---- memory: as much as the nodes need one after another, which stays from one launch to the next ---- */

static size_t allocated_at(const struct CUgraphExec_st *exec, uint64_t address)
{
	for (size_t i = 0; i < exec->count; i++)
		if (exec->entries[i].operation.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
		    exec->entries[i].operation.memory.address == address)
			return exec->entries[i].operation.memory.bytes;
	return 0;
}

static size_t most_bytes(const struct CUgraphExec_st *exec, int *device)
{
	size_t now = 0, most = 0;

	for (size_t i = 0; i < exec->count; i++) {
		const struct operation *o = &exec->entries[i].operation;

		if (o->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
			now += o->memory.bytes;
			*device = o->memory.device;
		} else if (o->type == CU_GRAPH_NODE_TYPE_MEM_FREE) {
			now -= allocated_at(exec, o->memory.address);
		}
		most = now > most ? now : most;
	}
	return most;
}

static CUresult take_memory(CUgraphExec exec, struct CUctx_st *context)
{
	CUresult result = CUDA_SUCCESS;

	pthread_mutex_lock(&exec_lock);
	if (!exec->memory && (exec->bytes = most_bytes(exec, &exec->device))) {
		result = memory_take(connection.visible[exec->device], context, exec->bytes, MEMORY_GRAPH,
				     &exec->memory);
		if (result == CUDA_SUCCESS) {
			reserved[exec->device].now += exec->bytes;
			if (reserved[exec->device].now > reserved[exec->device].high)
				reserved[exec->device].high = reserved[exec->device].now;
		}
	}
	pthread_mutex_unlock(&exec_lock);
	return result;
}

/* Of a context that was destroyed there is none any more. */
static void give_memory_back(CUgraphExec exec)
{
	pthread_mutex_lock(&exec_lock);
	if (exec->memory) {
		memory_give_back(exec->memory, MEMORY_GRAPH);
		reserved[exec->device].now -= exec->bytes;
	}
	exec->memory = 0;
	pthread_mutex_unlock(&exec_lock);
}

static CUresult check_attribute(CUdevice device, CUgraphMem_attribute attribute, const void *value)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	return value && attribute <= CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static bool is_high(CUgraphMem_attribute attribute)
{
	return attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
}

/* What is reserved is used. */
API cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
	CUresult result = check_attribute(device, attribute, value);

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&exec_lock);
	*(cuuint64_t *)value = is_high(attribute) ? reserved[device].high : reserved[device].now;
	pthread_mutex_unlock(&exec_lock);
	return CUDA_SUCCESS;
}

API cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
	CUresult result = check_attribute(device, attribute, value);

	if (result != CUDA_SUCCESS)
		return result;
	if (!is_high(attribute) || *(cuuint64_t *)value)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&exec_lock);
	reserved[device].high = reserved[device].now;
	pthread_mutex_unlock(&exec_lock);
	return CUDA_SUCCESS;
}

/* Nothing is kept that no executable graph has. */
API cuDeviceGraphMemTrim(CUdevice device)
{
	return ready_ordinal(device);
}

/* ---- making ---- */

/* How many; `top` NULL: each node is its own. */
static size_t flatten(CUgraph graph, struct entry *to, CUgraphNode top)
{
	size_t count = 0;

	for (size_t i = 0; i < graph->count; i++) {
		CUgraphNode node = graph->nodes[i];

		if (node->child) {
			count += flatten(node->child, to ? to + count : NULL, top ? top : node);
		} else if (node->operation.type != CU_GRAPH_NODE_TYPE_EMPTY) {
			if (to)
				to[count] = (struct entry){node->operation, node, top ? top : node, false};
			count++;
		}
	}
	return count;
}

static CUresult instantiate(CUgraphExec *out, CUgraph graph)
{
	struct CUgraphExec_st *exec;
	CUresult result = graph_check(graph);

	if (result != CUDA_SUCCESS)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	exec = calloc(1, sizeof(*exec));
	if (exec)
		exec->entries = malloc((flatten(graph, NULL, NULL) + 1) * sizeof(*exec->entries));
	if (!exec || !exec->entries) {
		free(exec);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	exec->magic = MAGIC_EXEC;
	exec->count = flatten(graph, exec->entries, NULL);
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

/* The nodes from `first` on stay what they were; only what they do may change. */
static CUgraphExecUpdateResult update_part(CUgraphExec exec, size_t first, size_t count, CUgraph graph)
{
	CUgraphExecUpdateResult result = CU_GRAPH_EXEC_UPDATE_SUCCESS;
	struct entry *now;

	if (flatten(graph, NULL, NULL) != count)
		return CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED;
	now = malloc((count + 1) * sizeof(*now));
	if (!now)
		return CU_GRAPH_EXEC_UPDATE_ERROR;
	flatten(graph, now, NULL);
	for (size_t i = 0; i < count; i++)
		if (now[i].operation.type != exec->entries[first + i].operation.type)
			result = CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED;
	for (size_t i = 0; i < count && result == CU_GRAPH_EXEC_UPDATE_SUCCESS; i++)
		exec->entries[first + i].operation = now[i].operation;
	free(now);
	return result;
}

static CUgraphExecUpdateResult update(CUgraphExec exec, CUgraph graph)
{
	return update_part(exec, 0, exec->count, graph);
}

static CUresult update_checked(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResult *what)
{
	CUresult result = check_exec(exec);

	if (result == CUDA_SUCCESS)
		result = what ? graph_check(graph) : CUDA_ERROR_INVALID_VALUE;
	if (result != CUDA_SUCCESS)
		return result;
	*what = update(exec, graph);
	return *what == CU_GRAPH_EXEC_UPDATE_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
}

static CUresult submit(struct CUstream_st *stream, const struct operation *o, bool *first)
{
	CUresult result;

	if (o->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC || o->type == CU_GRAPH_NODE_TYPE_MEM_FREE)
		return CUDA_SUCCESS;
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
	result = take_memory(exec, stream->context);
	for (size_t i = 0; result == CUDA_SUCCESS && i < exec->count; i++)
		if (!exec->entries[i].disabled)
			result = submit(stream, &exec->entries[i].operation, &first);
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
	give_memory_back(exec);
	exec->magic = 0;
	free(exec->entries);
	free(exec);
	return CUDA_SUCCESS;
}

/* ---- changing ---- */

static CUresult find(CUgraphExec exec, CUgraphNode node, struct entry **found)
{
	CUresult result = check_exec(exec);

	*found = NULL;
	for (size_t i = 0; result == CUDA_SUCCESS && i < exec->count; i++)
		if (exec->entries[i].node == node)
			*found = &exec->entries[i];
	return result == CUDA_SUCCESS && !*found ? CUDA_ERROR_INVALID_VALUE : result;
}

/* What was launched before does what it did. */
static CUresult change(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams params)
{
	struct operation operation;
	struct entry *entry;
	CUresult result = find(exec, node, &entry);
	CUgraph child;

	if (result == CUDA_SUCCESS && entry->operation.type != params.type)
		result = CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS)
		result = graph_operation_of(&params, &operation, &child);
	if (result == CUDA_SUCCESS)
		entry->operation = operation;
	return result;
}

static CUresult change_child(CUgraphExec exec, CUgraphNode node, CUgraph child)
{
	CUresult result = check_exec(exec);
	size_t first = 0, count = 0;

	if (result == CUDA_SUCCESS)
		result = graph_check(child);
	if (result != CUDA_SUCCESS)
		return result;
	while (first < exec->count && exec->entries[first].top != node)
		first++;
	while (first + count < exec->count && exec->entries[first + count].top == node)
		count++;
	return count && update_part(exec, first, count, child) == CU_GRAPH_EXEC_UPDATE_SUCCESS
		       ? CUDA_SUCCESS
		       : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)
{
	return params ? change(exec, node, kernel_params(params)) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphExecMemcpyNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMCPY3D *params, CUcontext context)
{
	(void)context;
	return params ? change(exec, node, copy_params(params)) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphExecMemsetNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *params,
				   CUcontext context)
{
	(void)context;
	return params ? change(exec, node, set_params(params)) : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child)
{
	return change_child(exec, node, child);
}

API cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params)
{
	if (!params)
		return CUDA_ERROR_INVALID_VALUE;
	if (params->type == CU_GRAPH_NODE_TYPE_GRAPH)
		return change_child(exec, node, params->graph.graph);
	return change(exec, node, *params);
}

API cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned enabled)
{
	struct entry *entry;
	CUresult result = find(exec, node, &entry);

	if (result == CUDA_SUCCESS)
		entry->disabled = !enabled;
	return result;
}

/* ---- the forms of before CUDA 12 ---- */

#include "exact_names.h"

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

API cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *params)
{
	return params ? change(exec, node, kernel_params_v1(params)) : CUDA_ERROR_INVALID_VALUE;
}
