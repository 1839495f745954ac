/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Others' launches are counted as if it were not there, and what it loses is shown as its own: it fills every map that
 * it can. `crowd WHAT…`, one after the other:
 *   functions  65600 functions that it invents, each launched once
 *   contexts   8300 contexts, most of them on devices that it invents
 *   threads    5000 threads at once, each of which pops a context and launches
 *   processes  3000 processes, one after the other, a launch in each
 *   sleepers   4200 processes at once, a launch in each
 *   five       five processes that each do what `functions` does
 *   events     40000 events that it invents, each recorded once
 *   names      4 threads that ask for invented functions for five seconds
 *   turns      300 launches, each through the next of three copies of its library, which it maps at one place
 *   graphs     20000 graphs, each ended before the next one is made
 *   event      one launch and one event
 *   work       50 launches of one function
 */
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
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
	CUcontext context;

	cuCtxPopCurrent(&context);
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

static void sleepers(void)
{
	for (int i = 0; i < 4200; i++) {
		if (!fork()) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			launch(16);
			pause();
		}
	}
	sleep(2);
}

static void five(void)
{
	for (int i = 0; i < 5; i++) {
		if (!fork()) {
			functions();
			_exit(0);
		}
	}
	for (int i = 0; i < 5; i++)
		wait(NULL);
}

static void events(int count)
{
	launch(16);
	for (unsigned long i = 1; i <= (unsigned long)count; i++)
		cuEventRecord((CUevent)(i << 8), NULL);
}

static void graphs(void)
{
	CUgraph graph;

	launch(16);
	for (int i = 0; i < 20000; i++) {
		cuGraphCreate(&graph, 0);
		cuGraphDestroy(graph);
	}
}

static void *ask(void *unused)
{
	time_t end = time(NULL) + 5;
	CUfunction function;
	char name[32];

	for (unsigned long i = 0; time(NULL) < end; i++) {
		snprintf(name, sizeof(name), "invented_%lu", i);
		cuModuleGetFunction(&function, NULL, name);
	}
	return unused;
}

static void names(void)
{
	pthread_t threads[4];

	for (int i = 0; i < 4; i++)
		pthread_create(&threads[i], NULL, ask, NULL);
	for (int i = 0; i < 4; i++)
		pthread_join(threads[i], NULL);
}

static void turns(void)
{
	unsigned long page = (unsigned long)cuLaunchKernel & ~4095ul;
	Dl_info library;
	char path[4096];
	int copies[3];

	if (!dladdr((void *)cuLaunchKernel, &library))
		exit(1);
	for (int i = 0; i < 3; i++) {
		snprintf(path, sizeof(path), "%s.%d", library.dli_fname, i);
		copies[i] = open(path, O_RDONLY);
	}
	for (int i = 0; i < 300; i++) {
		if (mmap((void *)page, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, copies[i % 3],
			 (off_t)(page - (unsigned long)library.dli_fbase)) == MAP_FAILED)
			exit(1);
		launch(64);
	}
}

static void work(void)
{
	CUcontext context;

	cuCtxCreate(&context, 0, 0);
	for (int i = 0; i < 50; i++)
		launch(32);
}

static void event(void)
{
	events(1);
}

static void many_events(void)
{
	events(40000);
}

static const struct {
	const char *name;
	void (*does)(void);
} JOBS[] = {
	{"functions", functions}, {"contexts", contexts}, {"threads", threads},	   {"processes", processes},
	{"sleepers", sleepers},	  {"five", five},	  {"events", many_events}, {"graphs", graphs},
	{"names", names},	  {"turns", turns},	  {"event", event},	   {"work", work},
};

int main(int count, char **what)
{
	for (int i = 1; i < count; i++)
		for (size_t job = 0; job < sizeof(JOBS) / sizeof(*JOBS); job++)
			if (!strcmp(what[i], JOBS[job].name))
				JOBS[job].does();
	puts("done");
	fflush(stdout);
	pause();
}
