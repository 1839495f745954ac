/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * All of its lives together stay in one budget: one process that launches for a few milliseconds and becomes its program
 * anew, again and again. `exec_again LIVES MILLISECONDS [LAUNCHES]`: prints "ready" in its first life and waits for a
 * line; in the last one it prints the launches of all of them.
 */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { NUMBER_BYTES = 24 };

static double now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

int main(int argc, char **argv)
{
	long lives = argc > 2 ? atol(argv[1]) : 0;
	unsigned long launches = argc > 3 ? strtoul(argv[3], NULL, 10) : 0;
	char left[NUMBER_BYTES], so_far[NUMBER_BYTES];
	CUcontext context;
	double until;

	if (argc < 3)
		return 2;
	cuInit(0);
	cuCtxCreate(&context, 0, 0);
	if (argc == 3) {
		puts("ready");
		fflush(stdout);
		getchar();
	}
	until = now_ms() + atof(argv[2]);
	do {
		cuLaunchKernel((CUfunction)0x10, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
		launches++;
	} while (now_ms() < until);
	if (lives <= 1) {
		printf("%lu\n", launches);
		return 0;
	}
	snprintf(left, sizeof(left), "%ld", lives - 1);
	snprintf(so_far, sizeof(so_far), "%lu", launches);
	execl("/proc/self/exe", argv[0], left, argv[2], so_far, (char *)NULL);
	return 1;
}
