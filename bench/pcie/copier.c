/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Copies to the device and nothing else. Two programs in one, for bench/pcie; times are CLOCK_MONOTONIC in ns.
 *
 *   copier load BYTES DEPTH            asynchronous copies of so many bytes, DEPTH of them in flight, until SIGTERM;
 *                                      0: blocking ones
 *   copier probe BYTES PERIOD_US COUNT a blocking copy per period, whose length varies by a half around it; prints how
 *                                      long each took
 */
#include <cuda.h>

#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "workloads/clock.h"

enum { MOST_STREAMS = 64, MOST_BYTES = 1 << 30 };

static void check(int holds, const char *what)
{
	if (holds)
		return;
	perror(what);
	exit(1);
}

static void ready(void)
{
	puts("ready");
	fflush(stdout);
}

static CUdeviceptr opened(size_t bytes, void **host)
{
	CUdevice device;
	CUcontext context;
	CUdeviceptr memory;

	check(cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS, "no device");
	check(cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS, "no context");
	check(cuCtxSetCurrent(context) == CUDA_SUCCESS, "the context is not taken");
	check(cuMemAlloc(&memory, bytes) == CUDA_SUCCESS, "no memory");
	check(cuMemAllocHost(host, bytes) == CUDA_SUCCESS, "no host memory");
	return memory;
}

static void load(size_t bytes, unsigned depth)
{
	CUstream streams[MOST_STREAMS];
	void *host;
	CUdeviceptr memory = opened(bytes, &host);

	for (unsigned i = 0; i < depth; i++)
		check(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "no stream");
	ready();
	for (unsigned i = 0; depth == 0; i++)
		check(cuMemcpyHtoD(memory, host, bytes) == CUDA_SUCCESS, "a copy failed");
	for (unsigned i = 0;; i = (i + 1) % depth) {
		check(cuStreamSynchronize(streams[i]) == CUDA_SUCCESS, "a wait failed");
		check(cuMemcpyHtoDAsync(memory, host, bytes, streams[i]) == CUDA_SUCCESS, "a copy failed");
	}
}

static void probe(size_t bytes, uint64_t period_ns, unsigned count)
{
	uint64_t *took = calloc(count, sizeof(*took)), next;
	void *host;
	CUdeviceptr memory = opened(bytes, &host);

	check(took != NULL, "no memory");
	ready();
	check(getchar() != EOF, "there is no go");
	next = clock_now_ns();
	srand48(20);
	for (unsigned i = 0; i < count; i++) {
		uint64_t begun;

		next += (uint64_t)((0.5 + drand48()) * (double)period_ns);
		if (clock_now_ns() > next)
			next = clock_now_ns();
		clock_sleep_until_ns(next);
		begun = clock_now_ns();
		check(cuMemcpyHtoD(memory, host, bytes) == CUDA_SUCCESS, "a copy failed");
		took[i] = clock_now_ns() - begun;
	}
	for (unsigned i = 0; i < count; i++)
		printf("%lu\n", took[i]);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	if (getppid()) /* not the first process of a container, whose parent starts it and ends */
		prctl(PR_SET_PDEATHSIG, 9);
	/* Before all else that wants the CPU: what waits for it copies nothing, and would seem to want less. */
	sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
	if (argc == 4 && strcmp(argv[1], "load") == 0)
		load(strtoul(argv[2], NULL, 10) % MOST_BYTES, (unsigned)strtoul(argv[3], NULL, 10) % MOST_STREAMS);
	else if (argc == 5 && strcmp(argv[1], "probe") == 0)
		probe(strtoul(argv[2], NULL, 10) % MOST_BYTES, strtoul(argv[3], NULL, 10) * 1000,
		      (unsigned)strtoul(argv[4], NULL, 10));
	else
		fputs("usage: copier load BYTES DEPTH | copier probe BYTES PERIOD_US COUNT\n", stderr);
	return argc < 4;
}
