/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "gpu.h"

#include <stdio.h>
#include <stdlib.h>

#include <ptx.h>

#include "clock.h"

enum {
	FIRST_GUESS_PER_US = 100,
	CALIBRATION_ROUNDS = 5,
	THREADS_PER_SM = 2048,
	BLOCKS_PER_SM = 32,
};

static const uint64_t SHORT_SPIN_NS = 1000000;
static const uint64_t LONG_SPIN_NS = 3000000;

static const char SINK_PTX[] = ".visible .global .align 8 .u64 spin_sink;\n";

/*
 * The chain of dependent multiplications can neither be vectorised nor computed in closed form, and the store that
 * all but never happens keeps the compiler from dropping the loop.
 */
static const char SPIN_PTX[] = ".visible .entry %s(\n"
			       "	.param .u64 spin_ns,\n"
			       "	.param .u64 spin_iterations_per_us\n"
			       ")\n"
			       "{\n"
			       "	.reg .pred %%p<3>;\n"
			       "	.reg .b32 %%r<2>;\n"
			       "	.reg .b64 %%rd<6>;\n"
			       "	ld.param.u64 %%rd1, [spin_ns];\n"
			       "	ld.param.u64 %%rd2, [spin_iterations_per_us];\n"
			       "	mul.lo.u64 %%rd3, %%rd1, %%rd2;\n"
			       "	div.u64 %%rd3, %%rd3, 1000;\n"
			       "	mov.u32 %%r1, %%tid.x;\n"
			       "	cvt.u64.u32 %%rd4, %%r1;\n"
			       "SPIN:\n"
			       "	setp.eq.u64 %%p1, %%rd3, 0;\n"
			       "	@%%p1 bra DONE;\n"
			       "	mad.lo.u64 %%rd4, %%rd4, 6364136223846793005, 1442695040888963407;\n"
			       "	sub.u64 %%rd3, %%rd3, 1;\n"
			       "	bra.uni SPIN;\n"
			       "DONE:\n"
			       "	setp.eq.u64 %%p2, %%rd4, 0;\n"
			       "	mov.u64 %%rd5, spin_sink;\n"
			       "	@%%p2 st.global.u64 [%%rd5], %%rd4;\n"
			       "	ret;\n"
			       "}\n";

void cuda_check(CUresult result, const char *what)
{
	const char *name = NULL;

	if (result == CUDA_SUCCESS)
		return;
	if (cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
		name = "unknown error";
	fprintf(stderr, "%s failed: %s (%d)\n", what, name, (int)result);
	exit(1);
}

CUmodule gpu_module(const char *ptx)
{
	CUmodule module;
	char *text;

	if (asprintf(&text, PTX_HEAD "%s", ptx) < 0)
		abort();
	cuda_check(cuModuleLoadData(&module, text), "cuModuleLoadData");
	free(text);
	return module;
}

static const char *name_of(unsigned function, char *name, size_t room)
{
	snprintf(name, room, function ? "spin_%u" : "spin", function);
	return name;
}

static char *spin_module(unsigned functions)
{
	char *text = NULL, name[32];
	size_t length = 0;
	FILE *file = open_memstream(&text, &length);

	if (!file)
		abort();
	fputs(SINK_PTX, file);
	for (unsigned i = 0; i < functions; i++)
		fprintf(file, SPIN_PTX, name_of(i, name, sizeof(name)));
	fclose(file);
	return text;
}

static void load_kernels(struct gpu *gpu, unsigned functions)
{
	char *text = spin_module(functions), name[32];

	gpu->module = gpu_module(text);
	free(text);
	for (unsigned i = 0; i < functions; i++)
		cuda_check(cuModuleGetFunction(&gpu->spin[i], gpu->module, name_of(i, name, sizeof(name))),
			   "cuModuleGetFunction");
}

void gpu_open(struct gpu *gpu, int ordinal, unsigned functions)
{
	CUdevice device;
	int sm_count = 0;

	cuda_check(cuInit(0), "cuInit");
	cuda_check(cuDeviceGet(&device, ordinal), "cuDeviceGet");
	cuda_check(cuDeviceGetAttribute(&sm_count, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device),
		   "cuDeviceGetAttribute");
	cuda_check(cuDevicePrimaryCtxRetain(&gpu->context, device), "cuDevicePrimaryCtxRetain");
	cuda_check(cuCtxSetCurrent(gpu->context), "cuCtxSetCurrent");
	load_kernels(gpu, functions);
	cuda_check(cuStreamCreate(&gpu->stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
	gpu->sm_count = (unsigned)sm_count;
	gpu->iterations_per_us = FIRST_GUESS_PER_US;
}

static unsigned resident(struct shape shape)
{
	unsigned blocks = THREADS_PER_SM / shape.threads;

	return blocks < 1 ? 1 : blocks > BLOCKS_PER_SM ? BLOCKS_PER_SM : blocks;
}

static unsigned blocks_per_wave(const struct gpu *gpu, struct shape shape)
{
	return gpu->sm_count * resident(shape);
}

uint64_t gpu_length_ns(const struct gpu *gpu, struct shape shape, uint64_t ns)
{
	unsigned wave = blocks_per_wave(gpu, shape), waves = shape.blocks / wave, rest = shape.blocks % wave;

	if (!waves)
		return ns;
	return ns * waves + ns * ((rest + gpu->sm_count - 1) / gpu->sm_count) / resident(shape);
}

static uint64_t timed_spin_ns(const struct gpu *gpu, struct shape shape, uint64_t spin_ns)
{
	uint64_t started_ns = clock_now_ns();

	gpu_spin(gpu, 0, shape, spin_ns);
	gpu_wait(gpu);
	return clock_now_ns() - started_ns;
}

void gpu_calibrate(struct gpu *gpu, struct shape shape)
{
	uint64_t fastest_short_ns = UINT64_MAX, fastest_long_ns = UINT64_MAX;
	unsigned wave = blocks_per_wave(gpu, shape);

	if (shape.blocks > wave)
		shape.blocks = wave;
	gpu->iterations_per_us = FIRST_GUESS_PER_US; /* another shape may have been measured before */
	timed_spin_ns(gpu, shape, LONG_SPIN_NS); /* wakes the clocks */
	for (int round = 0; round < CALIBRATION_ROUNDS; round++) {
		uint64_t short_ns = timed_spin_ns(gpu, shape, SHORT_SPIN_NS);
		uint64_t long_ns = timed_spin_ns(gpu, shape, LONG_SPIN_NS);

		if (short_ns < fastest_short_ns)
			fastest_short_ns = short_ns;
		if (long_ns < fastest_long_ns)
			fastest_long_ns = long_ns;
	}
	if (fastest_long_ns <= fastest_short_ns)
		return;
	/* The difference of two lengths leaves out what a launch and a wait cost. */
	gpu->iterations_per_us =
		(FIRST_GUESS_PER_US * (LONG_SPIN_NS - SHORT_SPIN_NS) + (fastest_long_ns - fastest_short_ns) / 2) /
		(fastest_long_ns - fastest_short_ns);
	if (gpu->iterations_per_us == 0)
		gpu->iterations_per_us = 1;
}

void gpu_spin(const struct gpu *gpu, unsigned function, struct shape shape, uint64_t ns)
{
	uint64_t iterations_per_us = gpu->iterations_per_us;
	void *parameters[] = {&ns, &iterations_per_us};

	cuda_check(cuLaunchKernel(gpu->spin[function], shape.blocks, 1, 1, shape.threads, 1, 1, 0, gpu->stream,
				  parameters, NULL),
		   "cuLaunchKernel");
}

void gpu_begin_graph(const struct gpu *gpu)
{
	cuda_check(cuStreamBeginCapture(gpu->stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
}

CUgraphExec gpu_end_graph(const struct gpu *gpu)
{
	CUgraph graph;
	CUgraphExec exec;

	cuda_check(cuStreamEndCapture(gpu->stream, &graph), "cuStreamEndCapture");
	cuda_check(cuGraphInstantiateWithFlags(&exec, graph, 0), "cuGraphInstantiateWithFlags");
	cuda_check(cuGraphDestroy(graph), "cuGraphDestroy");
	return exec;
}

void gpu_wait(const struct gpu *gpu)
{
	cuda_check(cuStreamSynchronize(gpu->stream), "cuStreamSynchronize");
}
