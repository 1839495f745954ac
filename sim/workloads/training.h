/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* One device's part of a training step: a batch copied in, then launches without waiting, of kernels or of graphs. */
#ifndef GPUWARDEN_WORKLOADS_TRAINING_H
#define GPUWARDEN_WORKLOADS_TRAINING_H

#include "gpu.h"
#include "kernels.h"

enum { MOST_DEPTH = 4096 };

struct work { /* what is to be done on each device */
	struct kernels kernels;
	unsigned launches; /* per step */
	unsigned graph; /* kernels per launch; 0: no graphs */
	unsigned depth; /* most launches in flight; 0: only the driver's own queue holds us back */
	uint64_t copy_bytes, memory_bytes;
	uint64_t iterations_per_us; /* 0: measure them */
};

struct worker {
	struct gpu gpu;
	CUdeviceptr memory, batch_on_device;
	void *batch;
	CUevent in_flight[MOST_DEPTH]; /* a ring: launch n is followed by event n modulo depth */
	uint64_t launched;
	CUgraphExec graph; /* NULL: launch by launch */
	uint64_t graph_ns; /* what its kernels take, one after another */
};

void worker_open(struct worker *worker, struct work *work, int ordinal);

/* Begins a step: the device becomes current, and the batch is copied. */
void worker_begin(struct worker *worker, const struct work *work);

/* One launch; returns how long it takes on a device of its own. */
uint64_t worker_launch(struct worker *worker, struct work *work);

#endif
