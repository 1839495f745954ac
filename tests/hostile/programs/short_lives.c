/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * All of its lives together stay in one budget: a chain of processes in one address space, each of which launches for a
 * few milliseconds, starts the next one and ends. `short_lives LIVES MILLISECONDS`: prints "ready", waits for a line,
 * and at the end prints the launches of all lives and the time that they took, in ns.
 */
#include <cuda.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define STACK (256 << 10)

static volatile unsigned long launches, begun;
static int lives, life_ns;

static unsigned long now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ul + now.tv_nsec;
}

static int live(void *number)
{
	long life = (long)number;
	unsigned long end = now_ns() + life_ns;
	char *stack;

	do {
		cuLaunchKernel((CUfunction)0x10, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
		launches++;
	} while (now_ns() < end);
	stack = malloc(STACK);
	if (life + 1 < lives && clone(live, stack + STACK, CLONE_VM | SIGCHLD, (void *)(life + 1)) > 0)
		return 0;
	printf("%lu %lu\n", launches, now_ns() - begun);
	fflush(stdout);
	return 0;
}

int main(int argc, char **argv)
{
	CUcontext context;
	char *stack = malloc(STACK);

	lives = argc > 1 ? atoi(argv[1]) : 100;
	life_ns = (argc > 2 ? atoi(argv[2]) : 5) * 1000000;
	cuInit(0);
	cuCtxCreate(&context, 0, 0);
	puts("ready");
	fflush(stdout);
	getchar();
	begun = now_ns();
	clone(live, stack + STACK, CLONE_VM | SIGCHLD, (void *)0);
	pause();
	return 0;
}
