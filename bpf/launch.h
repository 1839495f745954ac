/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Launches: how often each function was launched on each device, how many kernels, blocks and waves that was. */
#pragma once
#include "abi.h"

enum launch_shape {
	LAUNCH_ARGUMENTS = 1, /* (f, gx, gy, gz, bx, by, bz, shared, stream, …) */
	LAUNCH_CONFIG, /* (const CUlaunchConfig *, f, …) */
	LAUNCH_GRAPH, /* (graph exec, stream): as many kernels as the graph has */
	LAUNCH_LEGACY_1, /* cuLaunch (f): one block */
	LAUNCH_LEGACY_3, /* cuLaunchGrid (f, width, height) */
	LAUNCH_MANY, /* cuLaunchCooperativeKernelMultiDevice (const CUDA_LAUNCH_PARAMS *, count, …) */
};

#define MOST_OF_MANY 16

struct launch_key {
	struct process_id process;
	__u32 device; /* the process's own ordinal */
	__u32 _pad;
	__u64 function; /* CUfunction or CUgraphExec; 0 in `other_launches`: any, while `launches` was full */
};

struct launch_value {
	__u64 launches; /* calls */
	__u64 kernels; /* a graph's launch is as many as it has kernel nodes */
	__u64 blocks;
	__u64 waves; /* how often the SMs had to be filled; 0 while the SM count is unknown */
	__u64 wave_sms; /* Σ SMs that each wave keeps busy */
	__u64 last_ns;
	__u32 threads_per_block; /* of the latest launch */
	__u32 _pad;
};
