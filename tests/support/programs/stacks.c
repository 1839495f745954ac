/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * A program whose call paths are known. It prints "ready", then does what each line of its input asks and answers
 * "done": `launch N`: N times twice through train_step and once through evaluate; `keep N`: N times 3 MiB through
 * load_weights and 1 MiB through grow_cache, which stay, and 8 MiB through scratch, which does not.
 */
#include <cuda.h>
#include <ptx.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NOINLINE __attribute__((noinline))
#define MIB (1u << 20)

static const char PTX[] = PTX_HEAD ".visible .entry spin(.param .u64 spin_ns) { ret; }\n";
static CUfunction kernel;
static volatile int calls; /* something to do after each call, so that none becomes a jump */

static void check(CUresult result)
{
	if (result == CUDA_SUCCESS)
		return;
	fprintf(stderr, "stacks: error %d\n", (int)result);
	exit(1);
}

static NOINLINE void submit(void)
{
	unsigned long long ns = 1000;
	void *parameters[] = {&ns};

	check(cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL));
	calls++;
}

static NOINLINE void train_step(void)
{
	submit();
	submit();
	calls++;
}

static NOINLINE void evaluate(void)
{
	submit();
	calls++;
}

static NOINLINE CUdeviceptr take(size_t bytes)
{
	CUdeviceptr pointer;

	check(cuMemAlloc(&pointer, bytes));
	calls++;
	return pointer;
}

static NOINLINE void load_weights(void)
{
	take(3 * MIB);
	calls++;
}

static NOINLINE void grow_cache(void)
{
	take(MIB);
	calls++;
}

static NOINLINE void scratch(void)
{
	check(cuMemFree(take(8 * MIB)));
	calls++;
}

static NOINLINE void launch(int count)
{
	for (int i = 0; i < count; i++) {
		train_step();
		evaluate();
	}
	check(cuCtxSynchronize());
}

static NOINLINE void keep(int count)
{
	for (int i = 0; i < count; i++) {
		load_weights();
		grow_cache();
		scratch();
	}
}

int main(void)
{
	CUdevice device;
	CUcontext context;
	CUmodule module;
	char line[64];

	check(cuInit(0));
	check(cuDeviceGet(&device, 0));
	check(cuDevicePrimaryCtxRetain(&context, device));
	check(cuCtxSetCurrent(context));
	check(cuModuleLoadData(&module, PTX));
	check(cuModuleGetFunction(&kernel, module, "spin"));
	puts("ready");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin)) {
		if (!strncmp(line, "launch ", 7))
			launch(atoi(line + 7));
		else
			keep(atoi(line + 5));
		puts("done");
		fflush(stdout);
	}
	return 0;
}
