/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * A program whose driver calls are exactly those that its arguments name:
 *
 *   driver [threads=T] [leader=stays|leaves] [linger=yes|no] [through=symbol|pointer] [streams=legacy|per-thread]
 *          [visible=DEVICES] [COUNT*]OPERATION[:ARGUMENT…] …
 *
 * It prints "ready" and the handles of its kernels (those of device 0, then of device 1, …), waits for a line, does all
 * operations in each thread (which begins with device 0 current), prints "done", and ends at the end of its input.
 * With threads=0 the first thread does them itself; with leader=leaves that one ends, and another lives on.
 * `visible` sets CUDA_VISIBLE_DEVICES as programs do that set it themselves: /proc does not show that.
 * THREADS+OPERATION[+OPERATION…] is done by so many threads more, which end before the next operation; as
 * THREADS&OPERATION… they live until the process ends.
 * GRID and BLOCK are XxYxZ. `pointer` takes every function from cuGetProcAddress.
 */
#include <cuda.h>
#include <ptx.h>

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum {
	KERNELS = 8,
	MOST_DEVICES = 4,
	MOST_HELD = 64,
	MOST_ARGUMENTS = 3,
	NEWEST_VERSION = 12040,
	PREFETCH_VERSION = 12010, /* from 12020 on, cuMemPrefetchAsync has other arguments */
	BUFFER = 1 << 20,
	STREAMS = 4,
	MOST_LISTED = 100
};

static const char PTX[] = PTX_HEAD ".visible .entry k0(.param .u64 spin_ns) { ret; }\n"
				   ".visible .entry k1(.param .u64 spin_ns) { ret; }\n"
				   ".visible .entry k2(.param .u64 spin_ns) { ret; }\n"
				   ".visible .entry k3(.param .u64 spin_ns) { ret; }\n"
				   ".visible .entry k4(.param .u64 spin_ns) { ret; }\n"
				   ".visible .entry k5(.param .u64 spin_ns) { ret; }\n"
				   ".visible .entry k6(.param .u64 spin_ns) { ret; }\n"
				   ".visible .entry k7(.param .u64 spin_ns) { ret; }\n";

/* What a program compiled for per-thread default streams calls instead. */
extern __typeof__(cuGraphLaunch) cuGraphLaunch_ptsz;
extern __typeof__(cuLaunchCooperativeKernel) cuLaunchCooperativeKernel_ptsz;
extern __typeof__(cuLaunchKernel) cuLaunchKernel_ptsz;
extern __typeof__(cuLaunchKernelEx) cuLaunchKernelEx_ptsz;
extern __typeof__(cuMemAllocAsync) cuMemAllocAsync_ptsz;
extern __typeof__(cuMemAllocFromPoolAsync) cuMemAllocFromPoolAsync_ptsz;
extern __typeof__(cuMemFreeAsync) cuMemFreeAsync_ptsz;
extern __typeof__(cuMemPrefetchAsync) cuMemPrefetchAsync_ptsz;
extern __typeof__(cuMemcpy) cuMemcpy_ptds;
extern __typeof__(cuMemcpy2D) cuMemcpy2D_v2_ptds;
extern __typeof__(cuMemcpy2D) cuMemcpy2DUnaligned_v2_ptds;
extern __typeof__(cuMemcpy2DAsync) cuMemcpy2DAsync_v2_ptsz;
extern __typeof__(cuMemcpyAsync) cuMemcpyAsync_ptsz;
extern __typeof__(cuMemcpyDtoD) cuMemcpyDtoD_v2_ptds;
extern __typeof__(cuMemcpyDtoDAsync) cuMemcpyDtoDAsync_v2_ptsz;
extern __typeof__(cuMemcpyDtoH) cuMemcpyDtoH_v2_ptds;
extern __typeof__(cuMemcpyDtoHAsync) cuMemcpyDtoHAsync_v2_ptsz;
extern __typeof__(cuMemcpyHtoD) cuMemcpyHtoD_v2_ptds;
extern __typeof__(cuMemcpyHtoDAsync) cuMemcpyHtoDAsync_v2_ptsz;
extern __typeof__(cuMemcpyPeer) cuMemcpyPeer_ptds;
extern __typeof__(cuMemcpyPeerAsync) cuMemcpyPeerAsync_ptsz;
extern __typeof__(cuMemsetD16) cuMemsetD16_v2_ptds;
extern __typeof__(cuMemsetD16Async) cuMemsetD16Async_ptsz;
extern __typeof__(cuMemsetD32) cuMemsetD32_v2_ptds;
extern __typeof__(cuMemsetD32Async) cuMemsetD32Async_ptsz;
extern __typeof__(cuMemsetD8) cuMemsetD8_v2_ptds;
extern __typeof__(cuMemsetD8Async) cuMemsetD8Async_ptsz;
extern __typeof__(cuStreamSynchronize) cuStreamSynchronize_ptsz;

static bool through_pointer, per_thread, leader_leaves;
static bool linger; /* threads that have done their operations live until the process ends */
static pthread_barrier_t all_done, aside_done;
static int threads = 1, operation_count;
static char **operations, *program;
static int devices;
static CUcontext primary[MOST_DEVICES];
static CUfunction kernels[MOST_DEVICES][KERNELS];
static char host[BUFFER];
static CUstream streams[STREAMS]; /* the first is the default stream */

static __thread CUdeviceptr held[MOST_HELD];
static __thread int held_count;

static void check(CUresult result, const char *what)
{
	if (result == CUDA_SUCCESS)
		return;
	fprintf(stderr, "driver: %s: error %d\n", what, (int)result);
	exit(1);
}

static void fails(CUresult result, const char *what)
{
	if (result != CUDA_SUCCESS)
		return;
	fprintf(stderr, "driver: %s did not fail\n", what);
	exit(1);
}

static void *resolve(const char *name, void *symbol)
{
	CUdriverProcAddressQueryResult status;
	int flags = per_thread ? CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM : CU_GET_PROC_ADDRESS_DEFAULT;
	int version = strcmp(name, "cuMemPrefetchAsync") ? NEWEST_VERSION : PREFETCH_VERSION;
	void *function;

	if (!through_pointer)
		return symbol;
	check(cuGetProcAddress(name, &function, version, flags, &status), name);
	return function;
}

/* The name is taken before cuda.h turns it into that of the newest export. */
#define PLAIN(name) ((__typeof__(&name))resolve(#name, (void *)name))
#define FORM(name, twin) ((__typeof__(&name))resolve(#name, per_thread ? (void *)twin : (void *)name))

struct operation {
	const char *name;
	unsigned long count, arguments[MOST_ARGUMENTS], grid[3], block[3];
};

static CUdeviceptr top(void)
{
	if (!held_count) {
		fputs("driver: nothing is allocated\n", stderr);
		exit(1);
	}
	return held[held_count - 1];
}

static void hold(CUdeviceptr pointer)
{
	if (held_count == MOST_HELD) {
		fputs("driver: too much is allocated\n", stderr);
		exit(1);
	}
	held[held_count++] = pointer;
}

static CUcontext current_context(void)
{
	CUcontext context;

	check(cuCtxGetCurrent(&context), "cuCtxGetCurrent");
	return context;
}

static int device_now(void)
{
	CUdevice device;

	check(cuCtxGetDevice(&device), "cuCtxGetDevice");
	return device;
}

/* ---- launches: NAME:GRID:BLOCK[:KERNEL[:NANOSECONDS[:STREAM]]] (the stream for `launch` alone) is parsed into grid, block and arguments ---- */

static bool launch(const struct operation *o)
{
	const unsigned long *g = o->grid, *b = o->block;
	CUlaunchConfig config = {(unsigned)g[0],
				 (unsigned)g[1],
				 (unsigned)g[2],
				 (unsigned)b[0],
				 (unsigned)b[1],
				 (unsigned)b[2],
				 0,
				 NULL,
				 NULL,
				 0};
	unsigned long long ns = o->arguments[1] ? o->arguments[1] : 1000;
	void *parameters[] = {&ns};
	CUfunction f = kernels[0][0];
	CUresult result;

	if (strncmp(o->name, "launch", 6) != 0)
		return false;
	f = kernels[device_now()][o->arguments[0] % KERNELS];
	if (strcmp(o->name, "launch") == 0)
		result = FORM(cuLaunchKernel, cuLaunchKernel_ptsz)(
			f, config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY,
			config.blockDimZ, 0, streams[o->arguments[2] % STREAMS], parameters, NULL);
	else if (strcmp(o->name, "launch_cooperative") == 0)
		result = FORM(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz)(
			f, config.gridDimX, config.gridDimY, config.gridDimZ, config.blockDimX, config.blockDimY,
			config.blockDimZ, 0, NULL, parameters);
	else if (strcmp(o->name, "launch_ex") == 0)
		result = FORM(cuLaunchKernelEx, cuLaunchKernelEx_ptsz)(&config, f, parameters, NULL);
	else
		return false;
	check(result, o->name);
	return true;
}

/*
 * graph:LAUNCHES[:MORE]: that many launches of a graph of three kernels of 2 blocks, and more after it was updated: of
 * 7 blocks each
 */
static bool graph(const struct operation *o)
{
	unsigned long long ns = 1000;
	void *parameters[] = {&ns};
	CUDA_KERNEL_NODE_PARAMS node = {kernels[device_now()][0], 2, 1, 1, 32, 1, 1, 0, parameters, NULL, NULL, NULL};
	CUgraphExec exec;
	CUgraphNode made;
	CUgraph whole, wider;
	CUgraphExecUpdateResultInfo updated = {0};

	if (strcmp(o->name, "graph") != 0)
		return false;
	check(cuGraphCreate(&whole, 0), "cuGraphCreate");
	for (int i = 0; i < 3; i++)
		check(cuGraphAddKernelNode(&made, whole, NULL, 0, &node), "cuGraphAddKernelNode");
	check(cuGraphInstantiate(&exec, whole, 0), "cuGraphInstantiate");
	for (unsigned long i = 0; i < o->arguments[0]; i++)
		check(FORM(cuGraphLaunch, cuGraphLaunch_ptsz)(exec, NULL), "cuGraphLaunch");
	if (o->arguments[1]) {
		check(cuGraphCreate(&wider, 0), "cuGraphCreate");
		node.gridDimX = 7;
		for (int i = 0; i < 3; i++)
			check(cuGraphAddKernelNode(&made, wider, NULL, 0, &node), "cuGraphAddKernelNode");
		check(cuGraphExecUpdate(exec, wider, &updated), "cuGraphExecUpdate");
		check(cuGraphDestroy(wider), "cuGraphDestroy");
	}
	for (unsigned long i = 0; i < o->arguments[1]; i++)
		check(FORM(cuGraphLaunch, cuGraphLaunch_ptsz)(exec, NULL), "cuGraphLaunch");
	check(cuCtxSynchronize(), "cuCtxSynchronize");
	check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
	check(cuGraphDestroy(whole), "cuGraphDestroy");
	return true;
}

/* capture_begin:STREAM and capture_end:STREAM, which leaves the graph */
static bool capture(const struct operation *o)
{
	CUstream *stream = &streams[o->arguments[0] % STREAMS];
	CUgraph made;

	if (strcmp(o->name, "capture_begin") == 0) {
		check(cuStreamCreate(stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
		check(cuStreamBeginCapture(*stream, CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
	} else if (strcmp(o->name, "capture_end") == 0) {
		check(cuStreamEndCapture(*stream, &made), "cuStreamEndCapture");
	} else {
		return false;
	}
	return true;
}

/* ---- memory ---- */

/* create:BYTES[:DEVICE]; the device's memory, whatever context is current */
static CUresult create(CUdeviceptr *handle, const struct operation *o)
{
	CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
				    .location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)o->arguments[1]}};

	return PLAIN(cuMemCreate)(handle, o->arguments[0], &prop, 0);
}

static bool allocate(const struct operation *o)
{
	unsigned long bytes = o->arguments[0];
	CUdeviceptr pointer;
	size_t pitch;

	if (strcmp(o->name, "alloc") == 0)
		check(PLAIN(cuMemAlloc)(&pointer, bytes), "cuMemAlloc");
	else if (strcmp(o->name, "alloc_managed") == 0)
		check(PLAIN(cuMemAllocManaged)(&pointer, bytes, CU_MEM_ATTACH_GLOBAL), "cuMemAllocManaged");
	else if (strcmp(o->name, "alloc_async") == 0)
		check(FORM(cuMemAllocAsync, cuMemAllocAsync_ptsz)(&pointer, bytes, NULL), "cuMemAllocAsync");
	else if (strcmp(o->name, "alloc_pool") == 0)
		check(FORM(cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz)(&pointer, bytes, NULL, NULL),
		      "cuMemAllocFromPoolAsync");
	else if (strcmp(o->name, "alloc_pitch") == 0)
		check(PLAIN(cuMemAllocPitch)(&pointer, &pitch, bytes, o->arguments[1], 4), "cuMemAllocPitch");
	else if (strcmp(o->name, "create") == 0)
		check(create(&pointer, o), "cuMemCreate");
	else
		return false;
	hold(pointer);
	return true;
}

/* register:BYTES and unregister: of the same memory each time */
static bool register_host(const struct operation *o)
{
	if (strcmp(o->name, "register") == 0)
		check(cuMemHostRegister(host, o->arguments[0], 0), "cuMemHostRegister");
	else if (strcmp(o->name, "unregister") == 0)
		check(cuMemHostUnregister(host), "cuMemHostUnregister");
	else
		return false;
	return true;
}

/* ---- mappings: map, unmap, retain, share, all of the latest created memory; each mapping lies behind the one before ---- */

static bool map(const struct operation *o)
{
	static __thread CUdeviceptr range;
	static __thread size_t mapped;
	const size_t room = 64 << 20;
	size_t bytes = o->arguments[0];
	CUmemGenericAllocationHandle handle;
	int file;

	if (strcmp(o->name, "map") == 0) {
		if (!range)
			check(cuMemAddressReserve(&range, room, 0, 0, 0), "cuMemAddressReserve");
		check(PLAIN(cuMemMap)(range + mapped, bytes, 0, top(), 0), "cuMemMap");
		mapped += bytes;
	} else if (strcmp(o->name, "unmap") == 0) { /* so many bytes, the last that were mapped */
		mapped -= bytes;
		check(PLAIN(cuMemUnmap)(range + mapped, bytes), "cuMemUnmap");
	} else if (strcmp(o->name, "unmap_wrong") == 0) {
		fails(PLAIN(cuMemUnmap)(range, room), "cuMemUnmap");
	} else if (strcmp(o->name, "retain") == 0) { /* what was mapped last */
		check(PLAIN(cuMemRetainAllocationHandle)(&handle, (void *)(uintptr_t)(range + mapped - 1)),
		      "cuMemRetainAllocationHandle");
		hold(handle);
	} else if (strcmp(o->name, "share") == 0) { /* with itself */
		check(cuMemExportToShareableHandle(&file, top(), CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
		      "cuMemExportToShareableHandle");
		check(PLAIN(cuMemImportFromShareableHandle)(&handle, (void *)(intptr_t)file,
							    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
		      "cuMemImportFromShareableHandle");
		close(file);
		hold(handle);
	} else {
		return false;
	}
	return true;
}

static bool free_or_fail(const struct operation *o)
{
	CUdeviceptr pointer;

	if (strcmp(o->name, "alloc_too_much") == 0) {
		if (PLAIN(cuMemAlloc)(&pointer, o->arguments[0]) == CUDA_ERROR_OUT_OF_MEMORY)
			return true;
		fputs("driver: there was enough memory\n", stderr);
		exit(1);
	}
	if (strcmp(o->name, "release_wrong") == 0) { /* what is no handle */
		fails(PLAIN(cuMemRelease)(top()), "cuMemRelease");
		return true;
	}
	if (strcmp(o->name, "free") == 0)
		check(PLAIN(cuMemFree)(top()), "cuMemFree");
	else if (strcmp(o->name, "free_async") == 0)
		check(FORM(cuMemFreeAsync, cuMemFreeAsync_ptsz)(top(), NULL), "cuMemFreeAsync");
	else if (strcmp(o->name, "release") == 0)
		check(PLAIN(cuMemRelease)(top()), "cuMemRelease");
	else
		return false;
	held_count--;
	return true;
}

/* ---- copies, to, from and on the latest allocation ---- */

static bool copy_linear(const struct operation *o)
{
	size_t bytes = o->arguments[0];
	CUdeviceptr at, unified = (CUdeviceptr)(uintptr_t)host;
	CUresult result;

	if (strncmp(o->name, "copy_", 5) != 0)
		return false;
	at = top();
	if (strcmp(o->name, "copy_htod") == 0)
		result = FORM(cuMemcpyHtoD, cuMemcpyHtoD_v2_ptds)(at, host, bytes);
	else if (strcmp(o->name, "copy_htod_async") == 0)
		result = FORM(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2_ptsz)(at, host, bytes, NULL);
	else if (strcmp(o->name, "copy_dtoh") == 0)
		result = FORM(cuMemcpyDtoH, cuMemcpyDtoH_v2_ptds)(host, at, bytes);
	else if (strcmp(o->name, "copy_dtoh_async") == 0)
		result = FORM(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2_ptsz)(host, at, bytes, NULL);
	else if (strcmp(o->name, "copy_dtod") == 0)
		result = FORM(cuMemcpyDtoD, cuMemcpyDtoD_v2_ptds)(at, at + BUFFER / 2, bytes);
	else if (strcmp(o->name, "copy_dtod_async") == 0)
		result = FORM(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2_ptsz)(at, at + BUFFER / 2, bytes, NULL);
	else if (strcmp(o->name, "copy_peer") == 0)
		result = FORM(cuMemcpyPeer, cuMemcpyPeer_ptds)(at, primary[0], at + BUFFER / 2, primary[0], bytes);
	else if (strcmp(o->name, "copy_peer_async") == 0)
		result = FORM(cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz)(at, primary[0], at + BUFFER / 2, primary[0],
									 bytes, NULL);
	else if (strcmp(o->name, "copy_unified") == 0)
		result = FORM(cuMemcpy, cuMemcpy_ptds)(at, unified, bytes);
	else if (strcmp(o->name, "copy_unified_async") == 0)
		result = FORM(cuMemcpyAsync, cuMemcpyAsync_ptsz)(at, unified, bytes, NULL);
	else
		return false;
	check(result, o->name);
	return true;
}

/* peer…:BYTES: from memory of device 0, where its calls are made, to memory of device 1 */
static bool copy_to_peer(const struct operation *o)
{
	size_t bytes = o->arguments[0], zero = 0;
	CUmemcpyAttributes attributes = {.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM};
	CUDA_MEMCPY3D_PEER shape = {.srcMemoryType = CU_MEMORYTYPE_DEVICE,
				    .dstMemoryType = CU_MEMORYTYPE_DEVICE,
				    .srcContext = primary[0],
				    .dstContext = primary[1],
				    .WidthInBytes = bytes,
				    .Height = 1,
				    .Depth = 1};
	CUdeviceptr to, from;
	CUresult result;

	if (strncmp(o->name, "peer", 4) != 0)
		return false;
	check(cuCtxSetCurrent(primary[1]), "cuCtxSetCurrent");
	check(cuMemAlloc(&to, BUFFER), "cuMemAlloc");
	check(cuCtxSetCurrent(primary[0]), "cuCtxSetCurrent");
	check(cuMemAlloc(&from, BUFFER), "cuMemAlloc");
	shape.srcDevice = from;
	shape.dstDevice = to;
	if (strstr(o->name, "unified_3d"))
		shape.srcMemoryType = shape.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
	if (strcmp(o->name, "peer") == 0)
		result = cuMemcpyPeer(to, primary[1], from, primary[0], bytes);
	else if (strcmp(o->name, "peer_async") == 0)
		result = cuMemcpyPeerAsync(to, primary[1], from, primary[0], bytes, NULL);
	else if (strcmp(o->name, "peer_3d") == 0 || strcmp(o->name, "peer_unified_3d") == 0)
		result = cuMemcpy3DPeer(&shape);
	else if (strcmp(o->name, "peer_3d_async") == 0 || strcmp(o->name, "peer_unified_3d_async") == 0)
		result = cuMemcpy3DPeerAsync(&shape, NULL);
	else if (strcmp(o->name, "peer_unified") == 0)
		result = cuMemcpy(to, from, bytes);
	else if (strcmp(o->name, "peer_unified_async") == 0)
		result = cuMemcpyAsync(to, from, bytes, NULL);
	else if (strcmp(o->name, "peer_dtod") == 0)
		result = cuMemcpyDtoD(to, from, bytes);
	else if (strcmp(o->name, "peer_dtod_async") == 0)
		result = cuMemcpyDtoDAsync(to, from, bytes, NULL);
	else if (strcmp(o->name, "peer_inside") == 0)
		result = cuMemcpyDtoD(to + 512, from + 512, bytes);
	else if (strcmp(o->name, "peer_list") == 0)
		result = cuMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &zero, 1, NULL, CU_STREAM_PER_THREAD);
	else
		return false;
	check(result, o->name);
	check(cuCtxSynchronize(), "cuCtxSynchronize");
	check(cuMemFree(from), "cuMemFree");
	check(cuMemFree(to), "cuMemFree");
	return true;
}

/* rect_…:WIDTH:HEIGHT */
static bool copy_rectangle(const struct operation *o)
{
	CUDA_MEMCPY2D copy = {.WidthInBytes = o->arguments[0], .Height = o->arguments[1]};
	bool to_host = strstr(o->name, "dtoh") != NULL;

	if (strncmp(o->name, "rect_", 5) != 0)
		return false;
	copy.srcMemoryType = to_host ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
	copy.dstMemoryType = to_host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
	if (strstr(o->name, "half_unified"))
		*(to_host ? &copy.srcMemoryType : &copy.dstMemoryType) = CU_MEMORYTYPE_UNIFIED;
	copy.srcHost = copy.dstHost = host;
	*(to_host ? &copy.srcDevice : &copy.dstDevice) = top();
	copy.srcPitch = copy.dstPitch = o->arguments[0];
	if (strstr(o->name, "unaligned"))
		check(FORM(cuMemcpy2DUnaligned, cuMemcpy2DUnaligned_v2_ptds)(&copy), o->name);
	else if (strstr(o->name, "async"))
		check(FORM(cuMemcpy2DAsync, cuMemcpy2DAsync_v2_ptsz)(&copy, NULL), o->name);
	else
		check(FORM(cuMemcpy2D, cuMemcpy2D_v2_ptds)(&copy), o->name);
	return true;
}

/* graph_nodes:LAUNCHES:BYTES: of a graph that copies so much to the device, and sets as much */
static bool graph_nodes(const struct operation *o)
{
	unsigned long bytes = o->arguments[1];
	CUgraphNodeParams copy = {.type = CU_GRAPH_NODE_TYPE_MEMCPY}, set = {.type = CU_GRAPH_NODE_TYPE_MEMSET};
	CUgraphExec exec;
	CUgraphNode made;
	CUgraph whole;

	if (strcmp(o->name, "graph_nodes") != 0)
		return false;
	copy.memcpy.copyParams = (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_HOST,
						 .srcHost = host,
						 .dstMemoryType = CU_MEMORYTYPE_DEVICE,
						 .dstDevice = top(),
						 .WidthInBytes = bytes,
						 .Height = 1,
						 .Depth = 1};
	check(cuCtxGetCurrent(&copy.memcpy.copyCtx), "cuCtxGetCurrent");
	set.memset = (CUDA_MEMSET_NODE_PARAMS_v2){top(), 0, 0, 1, bytes, 1, copy.memcpy.copyCtx};
	check(cuGraphCreate(&whole, 0), "cuGraphCreate");
	check(cuGraphAddNode(&made, whole, NULL, 0, &copy), "cuGraphAddNode");
	check(cuGraphAddNode(&made, whole, NULL, 0, &set), "cuGraphAddNode");
	check(cuGraphInstantiate(&exec, whole, 0), "cuGraphInstantiate");
	for (unsigned long i = 0; i < o->arguments[0]; i++)
		check(FORM(cuGraphLaunch, cuGraphLaunch_ptsz)(exec, NULL), "cuGraphLaunch");
	check(cuCtxSynchronize(), "cuCtxSynchronize");
	check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
	check(cuGraphDestroy(whole), "cuGraphDestroy");
	return true;
}

static CUmemcpy3DOperand linear(CUdeviceptr at)
{
	return (CUmemcpy3DOperand){CU_MEMCPY_OPERAND_TYPE_POINTER, {.ptr = {.ptr = at}}};
}

/* copy_list_3d:COUNT (of copies to, from and on the device, by turns), copy_array_3d, prefetch_list:COUNT (half to each side) */
static bool copy_list(const struct operation *o)
{
	CUDA_MEMCPY3D_BATCH_OP copies[MOST_LISTED];
	CUdeviceptr pointers[MOST_LISTED];
	size_t count = o->arguments[0], sizes[MOST_LISTED], firsts[2] = {0, count / 2};
	CUmemLocation places[2] = {{CU_MEM_LOCATION_TYPE_DEVICE, 0}, {CU_MEM_LOCATION_TYPE_HOST, 0}};
	CUDA_ARRAY_DESCRIPTOR shape = {64, 8, CU_AD_FORMAT_FLOAT, 4};
	CUarray array;

	for (size_t i = 0; i < count && i < MOST_LISTED; i++) {
		CUmemcpy3DOperand here = linear((CUdeviceptr)(uintptr_t)host), there = linear(held_count ? top() : 0);

		copies[i] = (CUDA_MEMCPY3D_BATCH_OP){i % 3 == 0 ? here : there,
						     i % 3 == 1 ? here : there,
						     {10 + i, 3, 2},
						     CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
						     0};
		pointers[i] = there.op.ptr.ptr;
		sizes[i] = 100 + i;
	}
	if (strcmp(o->name, "copy_list_3d") == 0) {
		check(cuMemcpy3DBatchAsync(count, copies, NULL, 0, CU_STREAM_PER_THREAD), "cuMemcpy3DBatchAsync");
	} else if (strcmp(o->name, "copy_array_3d") == 0) {
		check(cuArrayCreate(&array, &shape), "cuArrayCreate");
		copies[0] = (CUDA_MEMCPY3D_BATCH_OP){{CU_MEMCPY_OPERAND_TYPE_ARRAY, {.array = {.array = array}}},
						     linear((CUdeviceptr)(uintptr_t)host),
						     {5, 3, 1},
						     CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
						     0};
		check(cuMemcpy3DWithAttributesAsync(copies, 0, CU_STREAM_PER_THREAD), "cuMemcpy3DWithAttributesAsync");
		check(cuArrayDestroy(array), "cuArrayDestroy");
	} else if (strcmp(o->name, "prefetch_list") == 0) {
		check(cuMemPrefetchBatchAsync(pointers, sizes, count, places, firsts, 2, 0, NULL),
		      "cuMemPrefetchBatchAsync");
	} else {
		return false;
	}
	return true;
}

/* set8:COUNT and so on; prefetch:BYTES */
static bool set(const struct operation *o)
{
	size_t count = o->arguments[0];
	CUresult result;

	if (strcmp(o->name, "set8") == 0)
		result = FORM(cuMemsetD8, cuMemsetD8_v2_ptds)(top(), 1, count);
	else if (strcmp(o->name, "set16") == 0)
		result = FORM(cuMemsetD16, cuMemsetD16_v2_ptds)(top(), 1, count);
	else if (strcmp(o->name, "set32") == 0)
		result = FORM(cuMemsetD32, cuMemsetD32_v2_ptds)(top(), 1, count);
	else if (strcmp(o->name, "set8_async") == 0)
		result = FORM(cuMemsetD8Async, cuMemsetD8Async_ptsz)(top(), 1, count, NULL);
	else if (strcmp(o->name, "set16_async") == 0)
		result = FORM(cuMemsetD16Async, cuMemsetD16Async_ptsz)(top(), 1, count, NULL);
	else if (strcmp(o->name, "set32_async") == 0)
		result = FORM(cuMemsetD32Async, cuMemsetD32Async_ptsz)(top(), 1, count, NULL);
	else if (strcmp(o->name, "prefetch") == 0)
		result = FORM(cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz)(top(), count, 0, NULL);
	else
		return false;
	check(result, o->name);
	return true;
}

/* ---- waits and contexts ---- */

static bool wait_for(const struct operation *o)
{
	CUevent event;

	if (strcmp(o->name, "sync") == 0) {
		check(PLAIN(cuCtxSynchronize)(), "cuCtxSynchronize");
	} else if (strcmp(o->name, "sync_stream") == 0) {
		check(FORM(cuStreamSynchronize, cuStreamSynchronize_ptsz)(NULL), "cuStreamSynchronize");
	} else if (strcmp(o->name, "sync_event") == 0) {
		check(cuEventCreate(&event, CU_EVENT_DEFAULT), "cuEventCreate");
		check(cuEventRecord(event, NULL), "cuEventRecord");
		check(PLAIN(cuEventSynchronize)(event), "cuEventSynchronize");
		check(cuEventDestroy(event), "cuEventDestroy");
	} else if (strcmp(o->name, "query") == 0) { /* once, whatever the answer */
		PLAIN(cuStreamQuery)(NULL);
	} else if (strcmp(o->name, "idle") == 0) { /* does nothing for so many milliseconds */
		usleep(o->arguments[0] * 1000);
	} else {
		return false;
	}
	return true;
}

static bool context(const struct operation *o)
{
	CUcontext any, chosen = primary[o->arguments[0] % MOST_DEVICES];
	int device = (int)o->arguments[0];
	CUuuid uuid;

	if (strcmp(o->name, "set") == 0)
		check(PLAIN(cuCtxSetCurrent)(chosen), "cuCtxSetCurrent");
	else if (strcmp(o->name, "unset") == 0)
		check(PLAIN(cuCtxSetCurrent)(NULL), "cuCtxSetCurrent(NULL)");
	else if (strcmp(o->name, "push") == 0)
		check(PLAIN(cuCtxPushCurrent)(chosen), "cuCtxPushCurrent");
	else if (strcmp(o->name, "pop") == 0)
		check(PLAIN(cuCtxPopCurrent)(&any), "cuCtxPopCurrent");
	else if (strcmp(o->name, "new") == 0)
		check(cuCtxCreate(&any, 0, device), "cuCtxCreate");
	else if (strcmp(o->name, "destroy") == 0)
		check(cuCtxDestroy(current_context()), "cuCtxDestroy");
	else if (strcmp(o->name, "retain_primary") == 0)
		check(PLAIN(cuDevicePrimaryCtxRetain)(&any, device), "cuDevicePrimaryCtxRetain");
	else if (strcmp(o->name, "release_primary") == 0)
		check(cuDevicePrimaryCtxRelease(device), "cuDevicePrimaryCtxRelease");
	else if (strcmp(o->name, "uuid") == 0)
		check(cuDeviceGetUuid(&uuid, device), "cuDeviceGetUuid");
	else if (strcmp(o->name, "bus") == 0) { /* which ordinal is there where that one is */
		char text[32];

		check(cuDeviceGetPCIBusId(text, sizeof(text), device), "cuDeviceGetPCIBusId");
		check(PLAIN(cuDeviceGetByPCIBusId)(&device, text), "cuDeviceGetByPCIBusId");
	} else if (strcmp(o->name, "set_wrong") == 0) /* what is no context */
		fails(PLAIN(cuCtxSetCurrent)((CUcontext)host), "cuCtxSetCurrent");
	else
		return false;
	return true;
}

/* green:DEVICE makes a green context and pushes it; green_destroy: the latest, which was popped */
static bool green_context(const struct operation *o)
{
	static __thread CUgreenCtx made;
	CUdevice device = (CUdevice)o->arguments[0];
	CUdevResource sms;
	CUdevResourceDesc description;
	CUcontext context;

	if (strcmp(o->name, "green") == 0) {
		check(cuDeviceGetDevResource(device, &sms, CU_DEV_RESOURCE_TYPE_SM), "cuDeviceGetDevResource");
		check(cuDevResourceGenerateDesc(&description, &sms, 1), "cuDevResourceGenerateDesc");
		check(PLAIN(cuGreenCtxCreate)(&made, description, device, CU_GREEN_CTX_DEFAULT_STREAM),
		      "cuGreenCtxCreate");
		check(PLAIN(cuCtxFromGreenCtx)(&context, made), "cuCtxFromGreenCtx");
		check(PLAIN(cuCtxPushCurrent)(context), "cuCtxPushCurrent");
	} else if (strcmp(o->name, "green_destroy") == 0) {
		check(PLAIN(cuGreenCtxDestroy)(made), "cuGreenCtxDestroy");
	} else {
		return false;
	}
	return true;
}

/* fork: a child without CUDA, waited for; exec: this program again, with the operations that are left */
static bool life(const struct operation *o, int next)
{
	pid_t child;
	int status;

	if (strcmp(o->name, "fork") == 0) {
		child = fork();
		if (child == 0)
			_exit(0);
		if (child < 0 || waitpid(child, &status, 0) != child || status != 0)
			exit(1);
	} else if (strcmp(o->name, "exec") == 0) {
		operations[next - 1] = program;
		execv("/proc/self/exe", operations + next - 1);
		exit(1);
	} else {
		return false;
	}
	return true;
}

/* ---- running ---- */

static void sizes(const char *text, unsigned long size[3])
{
	if (text && sscanf(text, "%lux%lux%lu", &size[0], &size[1], &size[2]) == 3)
		return;
	fputs("driver: a grid or a block is XxYxZ\n", stderr);
	exit(2);
}

static struct operation parse(char *text)
{
	struct operation o = {.count = 1};
	char *star = strchr(text, '*'), *place = NULL, *field;

	if (star) {
		o.count = strtoul(text, NULL, 10);
		text = star + 1;
	}
	o.name = strtok_r(text, ":", &place);
	if (strncmp(o.name, "launch", 6) == 0) {
		sizes(strtok_r(NULL, ":", &place), o.grid);
		sizes(strtok_r(NULL, ":", &place), o.block);
	}
	for (int i = 0; i < MOST_ARGUMENTS && (field = strtok_r(NULL, ":", &place)); i++)
		o.arguments[i] = strtoul(field, NULL, 10);
	return o;
}

static void carry_out(const char *operation, int next)
{
	char *text = strdup(operation);
	struct operation o = parse(text);

	for (unsigned long n = 0; n < o.count; n++)
		if (!launch(&o) && !capture(&o) && !graph(&o) && !graph_nodes(&o) && !allocate(&o) &&
		    !register_host(&o) && !map(&o) && !free_or_fail(&o) && !copy_linear(&o) && !copy_to_peer(&o) &&
		    !copy_rectangle(&o) && !set(&o) && !copy_list(&o) && !wait_for(&o) && !context(&o) &&
		    !green_context(&o) && !life(&o, next)) {
			fprintf(stderr, "driver: no such operation: %s\n", operation);
			exit(2);
		}
	free(text);
}

struct aside {
	const char *joined;
	bool stays;
};

static void *work_aside(void *given)
{
	struct aside aside = *(struct aside *)given;
	char *text = strdup(aside.joined), *place;

	check(PLAIN(cuCtxSetCurrent)(primary[0]), "cuCtxSetCurrent");
	for (char *one = strtok_r(text, "+", &place); one; one = strtok_r(NULL, "+", &place))
		carry_out(one, operation_count);
	free(text);
	pthread_barrier_wait(&aside_done);
	if (aside.stays)
		pause();
	return NULL;
}

static void work_of_others(int count, struct aside aside)
{
	pthread_t ids[64];

	pthread_barrier_init(&aside_done, NULL, (unsigned)count + 1);
	for (int t = 0; t < count; t++)
		if (pthread_create(&ids[t], NULL, work_aside, &aside) != 0)
			exit(1);
	pthread_barrier_wait(&aside_done);
	for (int t = 0; t < count && !aside.stays; t++)
		pthread_join(ids[t], NULL);
}

static void *work(void *unused)
{
	(void)unused;
	check(PLAIN(cuCtxSetCurrent)(primary[0]), "cuCtxSetCurrent");
	for (int i = 0; i < operation_count; i++) {
		char *sign = strpbrk(operations[i], "+&");

		if (sign)
			work_of_others(atoi(operations[i]), (struct aside){sign + 1, *sign == '&'});
		else
			carry_out(operations[i], i + 1);
	}
	if (linger) {
		pthread_barrier_wait(&all_done);
		pause();
	}
	return NULL;
}

static void open_devices(void)
{
	char name[8];
	CUmodule module;

	check(cuInit(0), "cuInit");
	check(cuDeviceGetCount(&devices), "cuDeviceGetCount");
	for (int d = 0; d < devices && d < MOST_DEVICES; d++) {
		check(cuDevicePrimaryCtxRetain(&primary[d], d), "cuDevicePrimaryCtxRetain");
		check(cuCtxSetCurrent(primary[d]), "cuCtxSetCurrent");
		check(cuModuleLoadData(&module, PTX), "cuModuleLoadData");
		for (int k = 0; k < KERNELS; k++) {
			snprintf(name, sizeof(name), "k%d", k);
			check(cuModuleGetFunction(&kernels[d][k], module, name), "cuModuleGetFunction");
		}
	}
}

static void options(int argc, char **argv)
{
	int i = 1;

	for (; i < argc; i++) {
		if (strncmp(argv[i], "threads=", 8) == 0)
			threads = atoi(argv[i] + 8);
		else if (strncmp(argv[i], "linger=", 7) == 0)
			linger = strcmp(argv[i] + 7, "yes") == 0;
		else if (strncmp(argv[i], "through=", 8) == 0)
			through_pointer = strcmp(argv[i] + 8, "pointer") == 0;
		else if (strncmp(argv[i], "visible=", 8) == 0)
			setenv("CUDA_VISIBLE_DEVICES", argv[i] + 8, 1);
		else if (strncmp(argv[i], "leader=", 7) == 0)
			leader_leaves = strcmp(argv[i] + 7, "leaves") == 0;
		else if (strncmp(argv[i], "streams=", 8) == 0)
			per_thread = strcmp(argv[i] + 8, "per-thread") == 0;
		else
			break;
	}
	program = argv[0];
	operations = argv + i;
	operation_count = argc - i;
}

static void *tell(void *unused)
{
	(void)unused;
	puts("done");
	fflush(stdout);
	while (getchar() != EOF)
		;
	return NULL;
}

static void *work_and_tell(void *unused)
{
	work(unused);
	return tell(unused);
}

int main(int argc, char **argv)
{
	pthread_t ids[64];

	options(argc, argv);
	open_devices();
	memset(host, 1, sizeof(host)); /* as data that a program copies was written before */
	printf("ready");
	for (int d = 0; d < devices && d < MOST_DEVICES; d++)
		for (int k = 0; k < KERNELS; k++)
			printf(" %p", (void *)kernels[d][k]);
	puts("");
	fflush(stdout);
	if (getchar() == EOF)
		return 1;
	pthread_barrier_init(&all_done, NULL, threads + 1);
	if (leader_leaves) {
		if (pthread_create(&ids[0], NULL, work_and_tell, NULL) != 0)
			return 1;
		pthread_exit(NULL);
	}
	if (threads == 0)
		work(NULL);
	for (int t = 0; t < threads; t++)
		if (pthread_create(&ids[t], NULL, work, NULL) != 0)
			return 1;
	if (linger)
		pthread_barrier_wait(&all_done);
	for (int t = 0; !linger && t < threads; t++)
		pthread_join(ids[t], NULL);
	tell(NULL);
	return 0;
}
