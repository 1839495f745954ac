/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The totals of all others stay what they were: numbers that no device has, through a libcuda.so.1 that takes them.
 * `big_numbers WHAT…`, one after the other:
 *   wait      for a byte
 *   sizes     allocations and copies near 2^64, near 2^63, and many of just under 2^46
 *   graph     a graph that holds itself, 44 times: 2^44 kernels, launched 1000 times
 *   grids     launches of 2^96 blocks
 *   ordinals  8300 contexts on as many devices, with an allocation and a launch on each
 *   park      an allocation that never returns
 *   destroy   contexts that never were are destroyed; prints how long that takes, in frees of what was never allocated
 */
#include <cuda.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define CALLS 2000

static const CUfunction function = (CUfunction)0x10;

static void wait_for_a_byte(void)
{
	char byte;

	if (read(0, &byte, 1) != 1)
		_exit(1);
}

static void sizes(void)
{
	CUdeviceptr pointer;

	for (unsigned i = 0; i < 64; i++) {
		cuMemAlloc(&pointer, ~0ul - i);
		cuMemAlloc(&pointer, (1ul << 63) - i);
		cuMemAlloc(&pointer, (1ul << 46) - i - 1);
		cuMemcpyHtoDAsync(pointer, &pointer, ~0ul - i, NULL);
		cuMemFree(pointer);
		cuMemAlloc(&pointer, (1ul << 46) - i - 1);
		cuMemcpyHtoDAsync(pointer, &pointer, (1ul << 46) - i, NULL);
	}
}

static void graph(void)
{
	CUDA_KERNEL_NODE_PARAMS kernel = {.func = function,
					  .gridDimX = 1,
					  .gridDimY = 1,
					  .gridDimZ = 1,
					  .blockDimX = 1,
					  .blockDimY = 1,
					  .blockDimZ = 1};
	CUgraph made;
	CUgraphNode node;
	CUgraphExec exec;

	cuGraphCreate(&made, 0);
	cuGraphAddKernelNode(&node, made, NULL, 0, &kernel);
	for (int i = 0; i < 44; i++)
		cuGraphAddChildGraphNode(&node, made, NULL, 0, made);
	cuGraphInstantiate(&exec, made, 0);
	for (int i = 0; i < 1000; i++)
		cuGraphLaunch(exec, NULL);
}

static void grids(void)
{
	for (int i = 0; i < 1000; i++)
		cuLaunchKernel(function, ~0u, ~0u, ~0u, 1, 1, 1, 0, NULL, NULL, NULL);
}

static void ordinals(void)
{
	CUcontext context;
	CUdeviceptr pointer;

	for (int device = 0; device < 8300; device++) {
		cuCtxCreate(&context, 0, device);
		cuMemAlloc(&pointer, 4096);
		cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
		cuCtxPopCurrent(&context);
	}
}

static void park(void)
{
	CUdeviceptr pointer;

	cuMemAlloc(&pointer, 8000000);
}

static double seconds(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static void destroy(void)
{
	double began = seconds(), between;

	for (unsigned long handle = 1; handle <= CALLS; handle++)
		cuMemFree(handle);
	between = seconds();
	for (unsigned long handle = 1; handle <= CALLS; handle++)
		cuCtxDestroy((CUcontext)handle);
	printf("%f\n", (seconds() - between) / (between - began));
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*act)(void);
	} acts[] = {{"wait", wait_for_a_byte}, {"sizes", sizes}, {"graph", graph},
		    {"grids", grids},	       {"park", park},	 {"destroy", destroy},
		    {"ordinals", ordinals}};
	char byte;

	cuInit(0);
	for (int i = 1; i < argc; i++)
		for (unsigned j = 0; j < sizeof(acts) / sizeof(*acts); j++)
			if (strcmp(argv[i], acts[j].name) == 0)
				acts[j].act();
	puts("done");
	fflush(stdout);
	while (read(0, &byte, 1) == 1)
		;
	return 0;
}
