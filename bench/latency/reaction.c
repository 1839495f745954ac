/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * When were launches let through? Two programs in one, for bench/latency/reaction.py; all times are CLOCK_MONOTONIC in ns.
 *
 *   reaction offline FILE SPACING_US   launches kernels of 5 µs, SPACING_US apart, and writes into FILE when each call
 *                                      returned; until SIGTERM
 *   reaction online BURSTS             each burst: six kernels of 500 µs, one wait, 5 to 15 ms of nothing; prints for
 *                                      each burst when its first launch was called and when its wait was over
 */
#include <cuda.h>
#include <ptx.h>

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include "workloads/clock.h"

enum { MOST_LAUNCHES = 1 << 22, BURST_KERNELS = 6, QUEUED = 64 };

static const char MODULE[] = PTX_HEAD ".visible .entry spin(.param .u64 spin_ns) { ret; }\n";

static void check(int holds, const char *what)
{
	if (holds)
		return;
	perror(what);
	exit(1);
}

static void sleep_us(unsigned us)
{
	struct timespec length = {.tv_nsec = (long)us * 1000};

	nanosleep(&length, NULL);
}

static CUfunction opened(CUstream *stream)
{
	CUdevice device;
	CUcontext context;
	CUmodule module;
	CUfunction function;

	check(cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS, "no device");
	check(cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS, "no context");
	check(cuCtxSetCurrent(context) == CUDA_SUCCESS, "the context is not taken");
	check(cuModuleLoadData(&module, MODULE) == CUDA_SUCCESS, "the module is not loaded");
	check(cuModuleGetFunction(&function, module, "spin") == CUDA_SUCCESS, "no function");
	check(cuStreamCreate(stream, CU_STREAM_NON_BLOCKING) == CUDA_SUCCESS, "no stream");
	return function;
}

static void launch(CUfunction function, CUstream stream, uint64_t ns)
{
	void *parameters[] = {&ns};

	check(cuLaunchKernel(function, 132, 1, 1, 1024, 1, 1, 0, stream, parameters, NULL) == CUDA_SUCCESS,
	      "a launch failed");
}

static void ready(void)
{
	puts("ready");
	fflush(stdout);
}

static void offline(const char *path, unsigned spacing_us)
{
	CUstream stream;
	CUfunction function = opened(&stream);
	size_t bytes = MOST_LAUNCHES * sizeof(uint64_t);
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	uint64_t *at;

	check(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0, path);
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	check(at != MAP_FAILED, "mmap");
	ready();
	for (size_t i = 0; i < MOST_LAUNCHES; i++) {
		uint64_t next = clock_now_ns() + spacing_us * 1000ull;

		launch(function, stream, 5000);
		at[i] = clock_now_ns();
		if (i % QUEUED == QUEUED - 1)
			check(cuStreamSynchronize(stream) == CUDA_SUCCESS, "a wait failed");
		while (clock_now_ns() < next)
			;
	}
}

static void online(unsigned bursts)
{
	CUstream stream;
	CUfunction function = opened(&stream);
	char byte;

	srand(1);
	ready();
	check(read(STDIN_FILENO, &byte, 1) == 1, "stdin ended before the start byte");
	for (unsigned burst = 0; burst < bursts; burst++) {
		uint64_t begun = clock_now_ns();

		for (int i = 0; i < BURST_KERNELS; i++)
			launch(function, stream, 500000);
		check(cuStreamSynchronize(stream) == CUDA_SUCCESS, "a wait failed");
		printf("%lu %lu\n", begun, clock_now_ns());
		sleep_us(5000 + (unsigned)(rand() % 10000));
	}
}

int main(int argc, char **argv)
{
	prctl(PR_SET_TIMERSLACK, 1);
	if (argc == 4 && strcmp(argv[1], "offline") == 0)
		offline(argv[2], (unsigned)atoi(argv[3]));
	else if (argc == 3 && strcmp(argv[1], "online") == 0)
		online((unsigned)atoi(argv[2]));
	else
		fprintf(stderr, "usage: reaction offline FILE SPACING_US | online BURSTS\n");
	return argc < 3 ? 2 : 0;
}
