/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Each stop that it swallows is counted: a process that launches, and its tracer, which lets no SIGSTOP through.
 * `swallow_stops LAUNCHES`: the traced process prints "ready", waits for a line, and at the end prints its launches.
 */
#include <cuda.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

static void swallow(pid_t traced)
{
	int status;

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (ptrace(PTRACE_SEIZE, traced, NULL, NULL))
		_exit(1);
	while (waitpid(traced, &status, __WALL) == traced && WIFSTOPPED(status)) {
		int number = WSTOPSIG(status);

		ptrace(PTRACE_CONT, traced, NULL, number == SIGSTOP || number == SIGTRAP ? 0 : (void *)(long)number);
	}
	_exit(0);
}

int main(int argc, char **argv)
{
	int count = argc > 1 ? atoi(argv[1]) : 1000;
	pid_t self = getpid(), tracer;
	CUcontext context;

	cuInit(0);
	cuCtxCreate(&context, 0, 0);
	tracer = fork();
	if (tracer == 0)
		swallow(self);
	prctl(PR_SET_PTRACER, tracer);
	puts("ready");
	fflush(stdout);
	getchar();
	for (int i = 0; i < count; i++)
		cuLaunchKernel((CUfunction)0x10, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
	printf("%d\n", count);
	fflush(stdout);
	pause();
	return 0;
}
