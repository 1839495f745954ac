/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * exact THREADS COUNT KIND [proc]: prints "ready", waits for a line, makes COUNT calls of KIND from each of THREADS
 * threads, prints "done", waits for another line and ends. With "proc" the calls go through cuGetProcAddress.
 */
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char PTX[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
			  ".visible .entry spin(.param .u64 spin_ns)\n{ ret; }\n";
static CUcontext contexts[2];
static CUfunction function;
static CUgraphExec graph;
static int count, through_table;
static const char *kind;

static void check(CUresult result, const char *what)
{
	if (result != CUDA_SUCCESS) {
		fprintf(stderr, "%s: %d\n", what, result);
		exit(1);
	}
}
#define CHECK(call) check(call, #call)

static void *address(const char *name, void *plain)
{
	void *found = plain;

	if (through_table)
		CHECK(cuGetProcAddress(name, &found, 12040, CU_GET_PROC_ADDRESS_DEFAULT, NULL));
	return found;
}

static void launch(void)
{
	__typeof__(&cuLaunchKernel) call = address("cuLaunchKernel", cuLaunchKernel);
	uint64_t ns = 1000;
	void *params[] = {&ns};

	for (int i = 0; i < count; i++)
		CHECK(call(function, 7, 3, 1, 32, 2, 5, 0, NULL, params, NULL));
}

static void launch_config(void)
{
	__typeof__(&cuLaunchKernelEx) call = address("cuLaunchKernelEx", cuLaunchKernelEx);
	CUlaunchConfig config = {
		.gridDimX = 11, .gridDimY = 1, .gridDimZ = 2, .blockDimX = 64, .blockDimY = 3, .blockDimZ = 1};
	uint64_t ns = 1000;
	void *params[] = {&ns};

	for (int i = 0; i < count; i++)
		CHECK(call(&config, function, params, NULL));
}

static void launch_cooperative(void)
{
	__typeof__(&cuLaunchCooperativeKernel) call = address("cuLaunchCooperativeKernel", cuLaunchCooperativeKernel);
	uint64_t ns = 1000;
	void *params[] = {&ns};

	for (int i = 0; i < count; i++)
		CHECK(call(function, 5, 1, 1, 32, 1, 1, 0, NULL, params));
}

static void launch_graph(void)
{
	__typeof__(&cuGraphLaunch) call = address("cuGraphLaunch", cuGraphLaunch);

	for (int i = 0; i < count; i++)
		CHECK(call(graph, NULL));
}

static void memory(void)
{
	__typeof__(&cuMemAlloc) take = address("cuMemAlloc", cuMemAlloc);
	__typeof__(&cuMemFree) give = address("cuMemFree", cuMemFree);
	CUdeviceptr kept, freed, none;

	for (int i = 0; i < count; i++) {
		CHECK(take(&kept, 1 << 20));
		CHECK(take(&freed, 3 << 20));
		CHECK(give(freed));
	}
	if (take(&none, 1ull << 50) != CUDA_ERROR_OUT_OF_MEMORY)
		check(CUDA_ERROR_UNKNOWN, "a petabyte was there");
}

static void copies(void)
{
	__typeof__(&cuMemcpyHtoDAsync) up = address("cuMemcpyHtoDAsync", cuMemcpyHtoDAsync);
	__typeof__(&cuMemcpyDtoH) down = address("cuMemcpyDtoH", cuMemcpyDtoH);
	__typeof__(&cuMemsetD32) fill = address("cuMemsetD32", cuMemsetD32);
	static char host[1 << 16];
	CUdeviceptr device;

	CHECK(cuMemAlloc(&device, sizeof(host)));
	for (int i = 0; i < count; i++) {
		CHECK(up(device, host, 1009, NULL));
		CHECK(down(host, device, 2003));
		CHECK(fill(device, 0, 101));
	}
}

static void requests(void)
{
	__typeof__(&cuCtxSynchronize) wait = address("cuCtxSynchronize", cuCtxSynchronize);
	uint64_t ns = 200000;
	void *params[] = {&ns};

	for (int i = 0; i < count; i++) {
		CHECK(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, NULL, params, NULL));
		CHECK(wait());
	}
}

static void devices(void)
{
	CHECK(cuCtxSetCurrent(contexts[0]));
	launch();
	CHECK(cuCtxPushCurrent(contexts[1]));
	launch();
	launch();
	CHECK(cuCtxPopCurrent(NULL));
	launch();
}

static const struct {
	const char *name;
	void (*run)(void);
} KINDS[] = {{"launch", launch},      {"config", launch_config}, {"cooperative", launch_cooperative},
	     {"graph", launch_graph}, {"memory", memory},	 {"copies", copies},
	     {"requests", requests},  {"devices", devices}};

static void *work(void *unused)
{
	(void)unused;
	CHECK(cuCtxSetCurrent(contexts[0]));
	for (size_t i = 0; i < sizeof(KINDS) / sizeof(KINDS[0]); i++)
		if (strcmp(KINDS[i].name, kind) == 0)
			KINDS[i].run();
	CHECK(cuCtxSynchronize());
	return NULL;
}

static void prepare(void)
{
	CUmodule module;
	CUgraph nodes;
	CUgraphNode node;
	uint64_t ns = 1000;
	void *params[] = {&ns};
	CUDA_KERNEL_NODE_PARAMS kernel = {.gridDimX = 2,
					  .gridDimY = 1,
					  .gridDimZ = 1,
					  .blockDimX = 32,
					  .blockDimY = 1,
					  .blockDimZ = 1,
					  .kernelParams = params};
	int gpus;

	CHECK(cuInit(0));
	CHECK(cuDeviceGetCount(&gpus));
	for (int d = 0; d < gpus && d < 2; d++)
		CHECK(cuDevicePrimaryCtxRetain(&contexts[d], d));
	CHECK(cuCtxSetCurrent(contexts[0]));
	CHECK(cuModuleLoadData(&module, PTX));
	CHECK(cuModuleGetFunction(&function, module, "spin"));
	kernel.func = function;
	CHECK(cuGraphCreate(&nodes, 0));
	for (int i = 0; i < 3; i++)
		CHECK(cuGraphAddKernelNode(&node, nodes, NULL, 0, &kernel));
	CHECK(cuGraphInstantiate(&graph, nodes, 0));
}

int main(int argc, char **argv)
{
	pthread_t threads[64];
	int thread_count = atoi(argv[1]);

	count = atoi(argv[2]);
	kind = argv[3];
	through_table = argc > 4 && strcmp(argv[4], "proc") == 0;
	prepare();
	puts("ready");
	fflush(stdout);
	getchar();
	for (int i = 0; i < thread_count; i++)
		pthread_create(&threads[i], NULL, work, NULL);
	for (int i = 0; i < thread_count; i++)
		pthread_join(threads[i], NULL);
	puts("done");
	fflush(stdout);
	getchar();
	return 0;
}
