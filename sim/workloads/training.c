/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "training.h"

static uint64_t kernel_length_ns(const struct worker *worker, struct kernel kernel)
{
	return gpu_length_ns(&worker->gpu, kernel.shape, kernel.ns);
}

static void record_graph(struct worker *worker, struct work *work)
{
	gpu_begin_graph(&worker->gpu);
	for (unsigned i = 0; i < work->graph; i++) {
		struct kernel kernel = kernels_next(&work->kernels);

		gpu_spin(&worker->gpu, kernel.function, kernel.shape, kernel.ns);
		worker->graph_ns += kernel_length_ns(worker, kernel);
	}
	worker->graph = gpu_end_graph(&worker->gpu);
}

void worker_open(struct worker *worker, struct work *work, int ordinal)
{
	gpu_open(&worker->gpu, ordinal, work->kernels.functions);
	if (work->memory_bytes)
		cuda_check(cuMemAlloc(&worker->memory, work->memory_bytes), "cuMemAlloc");
	if (work->copy_bytes) {
		cuda_check(cuMemAlloc(&worker->batch_on_device, work->copy_bytes), "cuMemAlloc");
		cuda_check(cuMemAllocHost(&worker->batch, work->copy_bytes), "cuMemAllocHost");
	}
	for (unsigned slot = 0; slot < work->depth; slot++)
		cuda_check(cuEventCreate(&worker->in_flight[slot], CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
			   "cuEventCreate");
	if (work->iterations_per_us)
		worker->gpu.iterations_per_us = work->iterations_per_us;
	else
		gpu_calibrate(&worker->gpu, work->kernels.shape);
	if (work->graph)
		record_graph(worker, work);
}

void worker_begin(struct worker *worker, const struct work *work)
{
	cuda_check(cuCtxSetCurrent(worker->gpu.context), "cuCtxSetCurrent");
	if (work->copy_bytes)
		cuda_check(
			cuMemcpyHtoDAsync(worker->batch_on_device, worker->batch, work->copy_bytes, worker->gpu.stream),
			"cuMemcpyHtoDAsync");
}

/* One kernel or one graph; returns how long it takes. */
static uint64_t submit(struct worker *worker, struct work *work)
{
	struct kernel kernel;

	if (worker->graph) {
		cuda_check(cuGraphLaunch(worker->graph, worker->gpu.stream), "cuGraphLaunch");
		return worker->graph_ns;
	}
	kernel = kernels_next(&work->kernels);
	gpu_spin(&worker->gpu, kernel.function, kernel.shape, kernel.ns);
	return kernel_length_ns(worker, kernel);
}

uint64_t worker_launch(struct worker *worker, struct work *work)
{
	CUevent *slot = work->depth ? &worker->in_flight[worker->launched % work->depth] : NULL;
	uint64_t ns;

	if (slot && worker->launched >= work->depth)
		cuda_check(cuEventSynchronize(*slot), "cuEventSynchronize");
	ns = submit(worker, work);
	if (slot)
		cuda_check(cuEventRecord(*slot, worker->gpu.stream), "cuEventRecord");
	worker->launched++;
	return ns;
}
