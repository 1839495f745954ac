/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Enforcement stays on for all others: a process that launches as fast as it can, and another one that ends each of its
 * stops. `stop_storm SECONDS`: prints "ready", waits for a line, and at the end prints how often it launched.
 */
#include <cuda.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

static void resume_for_ever(pid_t parent)
{
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	while (kill(parent, SIGCONT) == 0)
		;
	_exit(0);
}

int main(int argc, char **argv)
{
	double seconds = argc > 1 ? atof(argv[1]) : 1;
	unsigned long launches = 0;
	pid_t parent = getpid();
	CUcontext context;
	struct timespec now;
	time_t end;

	cuInit(0);
	cuCtxCreate(&context, 0, 0);
	puts("ready");
	fflush(stdout);
	getchar();
	if (fork() == 0)
		resume_for_ever(parent);
	clock_gettime(CLOCK_MONOTONIC, &now);
	end = now.tv_sec + (time_t)seconds;
	do {
		cuLaunchKernel((CUfunction)0x10, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
		launches++;
		clock_gettime(CLOCK_MONOTONIC, &now);
	} while (now.tv_sec < end);
	printf("%lu\n", launches);
	return 0;
}
