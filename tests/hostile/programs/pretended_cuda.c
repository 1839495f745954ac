/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * No number that it is given reaches another process than its caller: a libcuda.so.1 of the tenant's own, which has no device and
 * says success to everything. An allocation of PARKED bytes never returns.
 */
#include <cuda.h>
#include <unistd.h>

#define PARKED 8000000

static unsigned long handles = 0x1000;

static unsigned long next_handle(void)
{
	return __sync_add_and_fetch(&handles, 0x100);
}

CUresult cuInit(unsigned flags)
{
	(void)flags;
	return CUDA_SUCCESS;
}

CUresult cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device)
{
	(void)flags;
	(void)device;
	*context = (CUcontext)next_handle();
	return CUDA_SUCCESS;
}

CUresult cuCtxPopCurrent(CUcontext *context)
{
	*context = NULL;
	return CUDA_SUCCESS;
}

CUresult cuCtxDestroy(CUcontext context)
{
	(void)context;
	return CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr *pointer, size_t bytes)
{
	while (bytes == PARKED)
		pause();
	*pointer = next_handle();
	return CUDA_SUCCESS;
}

CUresult cuMemFree(CUdeviceptr pointer)
{
	(void)pointer;
	return CUDA_SUCCESS;
}

CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void *from, size_t bytes, CUstream stream)
{
	(void)to;
	(void)from;
	(void)bytes;
	(void)stream;
	return CUDA_SUCCESS;
}

CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
			unsigned shared_bytes, CUstream stream, void **params, void **extra)
{
	(void)f;
	(void)gx;
	(void)gy;
	(void)gz;
	(void)bx;
	(void)by;
	(void)bz;
	(void)shared_bytes;
	(void)stream;
	(void)params;
	(void)extra;
	return CUDA_SUCCESS;
}

CUresult cuEventRecord(CUevent event, CUstream stream)
{
	(void)event;
	(void)stream;
	return CUDA_SUCCESS;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	(void)module;
	(void)name;
	*function = (CUfunction)next_handle();
	return CUDA_SUCCESS;
}

CUresult cuGraphCreate(CUgraph *graph, unsigned flags)
{
	(void)flags;
	*graph = (CUgraph)next_handle();
	return CUDA_SUCCESS;
}

CUresult cuGraphDestroy(CUgraph graph)
{
	(void)graph;
	return CUDA_SUCCESS;
}

CUresult cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
			      const CUDA_KERNEL_NODE_PARAMS *params)
{
	(void)graph;
	(void)dependencies;
	(void)count;
	(void)params;
	*node = (CUgraphNode)next_handle();
	return CUDA_SUCCESS;
}

CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *dependencies, size_t count,
				  CUgraph child)
{
	(void)graph;
	(void)dependencies;
	(void)count;
	(void)child;
	*node = (CUgraphNode)next_handle();
	return CUDA_SUCCESS;
}

CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
	(void)graph;
	(void)flags;
	*exec = (CUgraphExec)next_handle();
	return CUDA_SUCCESS;
}

CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
	(void)exec;
	(void)stream;
	return CUDA_SUCCESS;
}
