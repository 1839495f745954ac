/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * An inference service: one request at a time, first come first served, for all clients. A request is a run of kernels,
 * an optional small copy back, and one wait. Latency counts from the arrival that was meant, so a queue is part of it.
 */
#ifndef GPUWARDEN_WORKLOADS_SERVICE_H
#define GPUWARDEN_WORKLOADS_SERVICE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "gpu.h"
#include "kernels.h"
#include "latencies.h"

struct request {
	unsigned launches;
	struct kernels kernels;
	uint64_t copy_bytes; /* device to host, after the kernels */
	bool graph; /* the kernels are one CUDA graph */
};

struct waiter;

struct service {
	struct gpu gpu;
	struct request request;
	CUdeviceptr answer_on_device;
	void *answer;
	CUgraphExec graph; /* NULL: launch by launch */
	uint64_t started_ns; /* what the log's arrivals are relative to */
	FILE *log; /* NULL: none */

	pthread_mutex_t lock;
	bool serving; /* a request */
	struct waiter *first,
		**last; /* the requests behind it, in the order of their arrival; last: where the next one goes */
	unsigned long waiting; /* with the one that is served */
	struct latencies latency;
	struct latencies busy;
};

/* Opens the device and makes ready to serve; calibrates unless `iterations_per_us` is given (not 0). */
void service_open(struct service *service, const struct request *request, int device, uint64_t iterations_per_us);

/* Serves one request that arrived at `arrival_ns` (CLOCK_MONOTONIC) and returns its latency. Any thread. */
uint64_t service_do(struct service *service, uint64_t arrival_ns);

/* A consistent copy of what was measured so far, as Prometheus text. */
void service_write_metrics(struct service *service, FILE *file);

#endif
