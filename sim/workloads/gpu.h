/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * One CUDA device as the workloads use it: a primary context, one stream, and a kernel that keeps SMs busy for as long
 * as it is asked to. The plain driver API only, so that the same programs run on a real GPU and on a simulated one.
 */
#ifndef GPUWARDEN_WORKLOADS_GPU_H
#define GPUWARDEN_WORKLOADS_GPU_H

#include <stdint.h>

#include <cuda.h>

enum { MOST_FUNCTIONS = 64 };

struct shape {
	unsigned blocks;
	unsigned threads; /* per block */
};

struct gpu {
	CUcontext context;
	CUmodule module;
	CUfunction spin[MOST_FUNCTIONS]; /* all the same but for their names */
	CUstream stream;
	unsigned sm_count;
	uint64_t iterations_per_us; /* of the spin kernel's loop, for one shape */
};

/* Ends the program with what failed and CUDA's name for why, unless `result` is CUDA_SUCCESS. */
void cuda_check(CUresult result, const char *what);

/* A module of PTX without the lines that say for which version and device. The context must be current. */
CUmodule gpu_module(const char *ptx);

/* Makes the device's primary context current and loads so many kernels. */
void gpu_open(struct gpu *gpu, int ordinal, unsigned functions);

/* Measures the loop for one wave of this shape. The device should be idle: what else runs is taken for a slow clock. */
void gpu_calibrate(struct gpu *gpu, struct shape shape);

/* Launches blocks that each spin for `ns`. Returns as soon as the launch is queued. The context must be current. */
void gpu_spin(const struct gpu *gpu, unsigned function, struct shape shape, uint64_t ns);

/* What is launched in between becomes a graph instead. */
void gpu_begin_graph(const struct gpu *gpu);
CUgraphExec gpu_end_graph(const struct gpu *gpu);

/* What a kernel of the shape takes alone, whose blocks take ns in a full wave; the rest of a wave shares SMs with less. */
uint64_t gpu_length_ns(const struct gpu *gpu, struct shape shape, uint64_t ns);

void gpu_wait(const struct gpu *gpu);

#endif
