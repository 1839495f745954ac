/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Is stopped no longer than its rule says, whatever others do: one thread that launches. `honest_launches SECONDS`: prints
 * "ready", waits for a line, and at the end prints its longest time between two launches, in ns, and their number.
 */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static unsigned long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ul + now.tv_nsec;
}

int main(int argc, char **argv)
{
	unsigned long launches = 0, longest = 0, now, before, end;
	CUcontext context;

	cuInit(0);
	cuCtxCreate(&context, 0, 0);
	puts("ready");
	fflush(stdout);
	getchar();
	before = now_ns();
	end = before + (unsigned long)(argc > 1 ? atoi(argv[1]) : 1) * 1000000000ul;
	do {
		cuLaunchKernel((CUfunction)0x10, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
		launches++;
		now = now_ns();
		if (now - before > longest)
			longest = now - before;
		before = now;
	} while (now < end);
	printf("%lu %lu\n", longest, launches);
	fflush(stdout);
	pause();
	return 0;
}
