/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * A program that makes one graph and one executable graph of it, by the operations that its arguments name:
 *
 *   kernel:BLOCKS copy:BYTES set:BYTES child:BLOCKS    a node more, copies are to the device, the child has two kernels
 *   alloc:BYTES free:NODE                               memory, and the end of what another node allocates
 *   change:NODE:AMOUNT remove:NODE                      in the graph; nodes count from 0 in the order of adding
 *   make update launch destroy                          (made anew, the executable graph is another one)
 *   exec_change:NODE:AMOUNT off:NODE on:NODE            in the executable graph
 *   free_outside:NODE                                   what a node allocated, after a launch
 *   capture_memory:FIRST:SECOND                         allocated and freed one after another, in a captured stream; launched
 *   again:BLOCKS                                        captures a kernel, then another into the same graph; both are launched
 *
 *   await                                               prints "done" and waits for another line
 *   exec                                                this program again, with the operations that are left
 *
 * It prints "ready", waits for a line, does them, prints "done", and ends at the end of its input.
 */
#include <cuda.h>
#include <ptx.h>

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST_NODES = 64, BUFFER = 1 << 20 };

static const char PTX[] = PTX_HEAD ".visible .entry work() { ret; }\n";

struct made {
	CUgraphNodeType type;
	CUgraphNode node;
	CUdeviceptr memory;
};

static CUcontext context;
static CUfunction function;
static CUdeviceptr memory;
static char host[BUFFER];
static CUgraph graph;
static CUgraphExec exec;
static struct made nodes[MOST_NODES];
static int count;

static void check(CUresult result, const char *what)
{
	if (result == CUDA_SUCCESS)
		return;
	fprintf(stderr, "graphs: %s: error %d\n", what, (int)result);
	exit(1);
}

static CUDA_KERNEL_NODE_PARAMS kernel_of(unsigned long blocks)
{
	return (CUDA_KERNEL_NODE_PARAMS){function, (unsigned)blocks, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL, NULL};
}

static CUDA_MEMCPY3D copy_of(unsigned long bytes)
{
	return (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_HOST,
			       .srcHost = host,
			       .dstMemoryType = CU_MEMORYTYPE_DEVICE,
			       .dstDevice = memory,
			       .WidthInBytes = bytes,
			       .Height = 1,
			       .Depth = 1};
}

static CUDA_MEMSET_NODE_PARAMS set_of(unsigned long bytes)
{
	return (CUDA_MEMSET_NODE_PARAMS){memory, 0, 0, 1, bytes, 1};
}

static CUgraph child_of(unsigned long blocks)
{
	CUDA_KERNEL_NODE_PARAMS kernel = kernel_of(blocks);
	CUgraphNode node;
	CUgraph child;

	check(cuGraphCreate(&child, 0), "cuGraphCreate");
	for (int i = 0; i < 2; i++)
		check(cuGraphAddKernelNode(&node, child, NULL, 0, &kernel), "cuGraphAddKernelNode");
	return child;
}

static CUgraphNodeParams any_of(CUgraphNodeType type, unsigned long amount)
{
	CUgraphNodeParams params = {.type = type};

	if (type == CU_GRAPH_NODE_TYPE_KERNEL)
		params.kernel = kernel_of(amount);
	else if (type == CU_GRAPH_NODE_TYPE_MEMCPY)
		params.memcpy = (CUDA_MEMCPY_NODE_PARAMS){0, 0, context, copy_of(amount)};
	else if (type == CU_GRAPH_NODE_TYPE_MEMSET)
		params.memset = (CUDA_MEMSET_NODE_PARAMS_v2){memory, 0, 0, 1, amount, 1, context};
	else
		params.graph.graph = child_of(amount);
	return params;
}

/* By the call of the type where the node has an even number, by that for any where it has an odd one. */
static bool add(const char *name, unsigned long amount)
{
	static const struct {
		const char *name;
		CUgraphNodeType type;
	} types[] = {{"kernel", CU_GRAPH_NODE_TYPE_KERNEL},
		     {"copy", CU_GRAPH_NODE_TYPE_MEMCPY},
		     {"set", CU_GRAPH_NODE_TYPE_MEMSET},
		     {"child", CU_GRAPH_NODE_TYPE_GRAPH}};
	struct made *made = &nodes[count % MOST_NODES];
	CUgraphNodeParams p;
	size_t i = 0;

	while (i < 4 && strcmp(types[i].name, name) != 0)
		i++;
	if (i == 4)
		return false;
	made->type = types[i].type;
	p = any_of(made->type, amount);
	if (count++ % 2)
		check(cuGraphAddNode(&made->node, graph, NULL, 0, &p), "cuGraphAddNode");
	else if (i == 0)
		check(cuGraphAddKernelNode(&made->node, graph, NULL, 0, &p.kernel), name);
	else if (i == 1)
		check(cuGraphAddMemcpyNode(&made->node, graph, NULL, 0, &p.memcpy.copyParams, context), name);
	else if (i == 2)
		check(cuGraphAddMemsetNode(&made->node, graph, NULL, 0,
					   &(CUDA_MEMSET_NODE_PARAMS){p.memset.dst, 0, 0, 1, amount, 1}, context),
		      name);
	else
		check(cuGraphAddChildGraphNode(&made->node, graph, NULL, 0, p.graph.graph), name);
	return true;
}

static bool add_memory(const char *name, unsigned long argument)
{
	CUgraphNodeParams p = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
	struct made *made = &nodes[count % MOST_NODES];

	p.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
	p.alloc.poolProps.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, 0};
	p.alloc.bytesize = argument;
	if (strcmp(name, "alloc") == 0 && count % 2)
		check(cuGraphAddNode(&made->node, graph, NULL, 0, &p), "cuGraphAddNode");
	else if (strcmp(name, "alloc") == 0)
		check(cuGraphAddMemAllocNode(&made->node, graph, NULL, 0, &p.alloc), "cuGraphAddMemAllocNode");
	if (strcmp(name, "alloc") == 0) {
		made->memory = p.alloc.dptr;
	} else if (strcmp(name, "free") == 0) {
		p.type = CU_GRAPH_NODE_TYPE_MEM_FREE;
		p.free.dptr = nodes[argument].memory;
		if (count % 2)
			check(cuGraphAddNode(&made->node, graph, NULL, 0, &p), "cuGraphAddNode");
		else
			check(cuGraphAddMemFreeNode(&made->node, graph, NULL, 0, p.free.dptr), "cuGraphAddMemFreeNode");
	} else {
		return false;
	}
	count++;
	return true;
}

static void change(const struct made *made, unsigned long amount)
{
	CUgraphNodeParams p = any_of(made->type, amount);
	CUDA_MEMSET_NODE_PARAMS set = set_of(amount);

	if ((made - nodes) % 2)
		check(cuGraphNodeSetParams(made->node, &p), "cuGraphNodeSetParams");
	else if (made->type == CU_GRAPH_NODE_TYPE_KERNEL)
		check(cuGraphKernelNodeSetParams(made->node, &p.kernel), "cuGraphKernelNodeSetParams");
	else if (made->type == CU_GRAPH_NODE_TYPE_MEMCPY)
		check(cuGraphMemcpyNodeSetParams(made->node, &p.memcpy.copyParams), "cuGraphMemcpyNodeSetParams");
	else
		check(cuGraphMemsetNodeSetParams(made->node, &set), "cuGraphMemsetNodeSetParams");
}

static void change_in_exec(const struct made *made, unsigned long amount)
{
	CUgraphNodeParams p = any_of(made->type, amount);
	CUDA_MEMSET_NODE_PARAMS set = set_of(amount);

	if ((made - nodes) % 2)
		check(cuGraphExecNodeSetParams(exec, made->node, &p), "cuGraphExecNodeSetParams");
	else if (made->type == CU_GRAPH_NODE_TYPE_KERNEL)
		check(cuGraphExecKernelNodeSetParams(exec, made->node, &p.kernel), "cuGraphExecKernelNodeSetParams");
	else if (made->type == CU_GRAPH_NODE_TYPE_MEMCPY)
		check(cuGraphExecMemcpyNodeSetParams(exec, made->node, &p.memcpy.copyParams, context),
		      "cuGraphExecMemcpyNodeSetParams");
	else if (made->type == CU_GRAPH_NODE_TYPE_MEMSET)
		check(cuGraphExecMemsetNodeSetParams(exec, made->node, &set, context),
		      "cuGraphExecMemsetNodeSetParams");
	else
		check(cuGraphExecChildGraphNodeSetParams(exec, made->node, p.graph.graph),
		      "cuGraphExecChildGraphNodeSetParams");
}

static void launch(CUgraphExec one)
{
	check(cuGraphLaunch(one, NULL), "cuGraphLaunch");
	check(cuCtxSynchronize(), "cuCtxSynchronize");
}

static void make(CUgraphExec *one, CUgraph of)
{
	check(cuGraphInstantiate(one, of, 0), "cuGraphInstantiate");
}

static void capture_again(unsigned long blocks)
{
	CUgraph captured, ended;
	CUgraphExec one;
	CUstream stream;

	check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
	check(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
	check(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
	check(cuStreamEndCapture(stream, &captured), "cuStreamEndCapture");
	make(&one, captured);
	launch(one);
	check(cuStreamBeginRecaptureToGraph(stream, CU_STREAM_CAPTURE_MODE_RELAXED, captured, NULL, NULL),
	      "cuStreamBeginRecaptureToGraph");
	check(cuLaunchKernel(function, (unsigned)blocks, 1, 1, 32, 1, 1, 0, stream, NULL, NULL), "cuLaunchKernel");
	check(cuStreamEndCapture(stream, &ended), "cuStreamEndCapture");
	make(&one, ended);
	launch(one);
}

static void capture_memory(unsigned long first, unsigned long second)
{
	const unsigned long sizes[] = {first, second};
	CUdeviceptr at;
	CUgraph captured;
	CUstream stream;

	check(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
	check(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
	for (int i = 0; i < 2; i++) {
		check(cuMemAllocAsync(&at, sizes[i], stream), "cuMemAllocAsync");
		check(cuMemFreeAsync(at, stream), "cuMemFreeAsync");
	}
	check(cuStreamEndCapture(stream, &captured), "cuStreamEndCapture");
	make(&exec, captured);
	launch(exec);
}

static bool carry_out(const char *name, unsigned long first, unsigned long second)
{
	CUgraphExecUpdateResultInfo updated;
	struct made *made = &nodes[first % MOST_NODES];

	if (strcmp(name, "change") == 0)
		change(made, second);
	else if (strcmp(name, "remove") == 0)
		check(cuGraphDestroyNode(made->node), "cuGraphDestroyNode");
	else if (strcmp(name, "make") == 0)
		make(&exec, graph);
	else if (strcmp(name, "update") == 0)
		check(cuGraphExecUpdate(exec, graph, &updated), "cuGraphExecUpdate");
	else if (strcmp(name, "exec_change") == 0)
		change_in_exec(made, second);
	else if (strcmp(name, "off") == 0 || strcmp(name, "on") == 0)
		check(cuGraphNodeSetEnabled(exec, made->node, strcmp(name, "on") == 0), "cuGraphNodeSetEnabled");
	else if (strcmp(name, "launch") == 0)
		launch(exec);
	else if (strcmp(name, "destroy") == 0)
		check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
	else if (strcmp(name, "free_outside") == 0)
		check(cuMemFree(made->memory), "cuMemFree");
	else if (strcmp(name, "capture_memory") == 0)
		capture_memory(first, second);
	else if (strcmp(name, "again") == 0)
		capture_again(first);
	else
		return false;
	return true;
}

static void set_up(void)
{
	CUmodule module;

	check(cuInit(0), "cuInit");
	check(cuCtxCreate(&context, 0, 0), "cuCtxCreate");
	check(cuModuleLoadData(&module, PTX), "cuModuleLoadData");
	check(cuModuleGetFunction(&function, module, "work"), "cuModuleGetFunction");
	check(cuMemAlloc(&memory, BUFFER), "cuMemAlloc");
	check(cuGraphCreate(&graph, 0), "cuGraphCreate");
}

static bool say(const char *word)
{
	char line[8];

	puts(word);
	fflush(stdout);
	return fgets(line, sizeof(line), stdin) != NULL;
}

int main(int argc, char **argv)
{
	setvbuf(stdin, NULL, _IONBF, 0); /* what it becomes reads the rest */
	if (!say("ready"))
		return 1;
	set_up();
	for (int i = 1; i < argc; i++) {
		char name[32] = "";
		unsigned long first = 0, second = 0;

		sscanf(argv[i], "%31[^:]:%lu:%lu", name, &first, &second);
		if (strcmp(name, "await") == 0) {
			if (!say("done"))
				return 0;
			continue;
		}
		if (strcmp(name, "exec") == 0) {
			argv[i] = argv[0];
			execv("/proc/self/exe", argv + i);
			return 1;
		}
		if (!add(name, first) && !add_memory(name, first) && !carry_out(name, first, second)) {
			fprintf(stderr, "graphs: no such operation: %s\n", argv[i]);
			return 2;
		}
	}
	while (say("done"))
		;
	return 0;
}
