// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * Calls functions of a shared library as often as its standard input says: `open FILE`, `call NAME TIMES`. Answers each
 * line with one: `ok`; what the last call returned, and nanoseconds per call; or `failed` and why. Each argument, in
 * registers and on the stack, points to zeros, and to pointers to zeros: what libcuda does before it notices that it was
 * not initialised.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

typedef int function(void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *, void *);

static void *zeros[4096];

static double now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1e9 + now.tv_nsec;
}

static void call(function *called, unsigned long times)
{
	double started_ns = now_ns();
	int result = 0;

	for (unsigned long i = 0; i < times; i++)
		result = called(zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros);
	printf("%d %.3f\n", result, (now_ns() - started_ns) / times);
}

int main(void)
{
	char line[4096], name[4096];
	void *library = NULL, *symbol;
	unsigned long times;

	setvbuf(stdout, NULL, _IOLBF, 0);
	while (fgets(line, sizeof(line), stdin)) {
		if (sscanf(line, "open %4095s", name) == 1) {
			library = dlopen(name, RTLD_NOW);
			puts(library ? "ok" : "failed: it cannot be loaded");
		} else if (sscanf(line, "call %4095s %lu", name, &times) == 2 && library && times) {
			symbol = dlsym(library, name);
			if (symbol)
				call((function *)symbol, times);
			else
				puts("failed: no such function");
		} else {
			puts("failed: not understood");
		}
	}
	return 0;
}
