/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Others' launches are counted as if it were not there, and what it loses is shown as its own: it fills every map that
 * it can. `crowd WHAT…`, one after the other:
 *   functions  65600 functions that it invents, each launched once
 *   contexts   8300 contexts, most of them on devices that it invents
 *   threads    5000 threads at once, a launch in each
 *   processes  3000 processes, one after the other, a launch in each
 *   work       50 launches of one function
 */
#include <cuda.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static void launch(unsigned long function)
{
	cuLaunchKernel((CUfunction)function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
}

static void functions(void)
{
	for (unsigned long i = 1; i <= 65600; i++)
		launch(i << 4);
}

static void contexts(void)
{
	CUcontext context;

	for (int i = 0; i < 8300; i++) {
		cuCtxCreate(&context, 0, i);
		launch(16);
		cuCtxPopCurrent(&context);
	}
}

static void *stay(void *unused)
{
	launch(16);
	pause();
	return unused;
}

static void threads(void)
{
	pthread_attr_t attributes;
	pthread_t thread;

	pthread_attr_init(&attributes);
	pthread_attr_setstacksize(&attributes, 16384);
	for (int i = 0; i < 5000; i++)
		pthread_create(&thread, &attributes, stay, NULL);
	sleep(1);
}

static void processes(void)
{
	for (int i = 0; i < 3000; i++) {
		if (!fork()) {
			launch(16);
			_exit(0);
		}
		wait(NULL);
	}
}

static void work(void)
{
	CUcontext context;

	cuCtxCreate(&context, 0, 0);
	for (int i = 0; i < 50; i++)
		launch(32);
}

int main(int count, char **what)
{
	for (int i = 1; i < count; i++) {
		if (!strcmp(what[i], "functions"))
			functions();
		else if (!strcmp(what[i], "contexts"))
			contexts();
		else if (!strcmp(what[i], "threads"))
			threads();
		else if (!strcmp(what[i], "processes"))
			processes();
		else
			work();
	}
	puts("done");
	fflush(stdout);
	pause();
}
