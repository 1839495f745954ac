/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Many processes in many containers, each a client of the driver of its own:
 *
 *   scale CGROUP CONTAINERS GPUS PROCESSES AT_ONCE FUNCTIONS LAUNCHES hold|end|work
 *
 * Each process enters one of the cgroups CGROUP/<64 hex digits>, loads a module of FUNCTIONS kernels, launches each one
 * LAUNCHES times, and waits. With `hold` all of them then live on until this program's input ends, and AT_ONCE of them
 * start at a time; with `work` they also launch all kernels ten times a second until then; with `end` they end, and AT_ONCE
 * of them live at a time. Prints "worked" once all have done it.
 */
#include <cuda.h>
#include <ptx.h>

#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* A real driver takes longer than this to initialise; a process that lives less than a reader of /proc needs has no device. */
enum { LIFE_US = 50000, PERIOD_MS = 100 };

static void check(bool holds, const char *what)
{
	if (holds)
		return;
	perror(what);
	_exit(1);
}

static void enter(const char *cgroup, unsigned container)
{
	char path[4096];
	FILE *file;

	snprintf(path, sizeof(path), "%s/%064x", cgroup, container + 1);
	mkdir(path, 0755);
	strcat(path, "/cgroup.procs");
	file = fopen(path, "w");
	check(file && fprintf(file, "%d", (int)getpid()) > 0 && fclose(file) == 0, path);
}

static char *module_text(unsigned functions)
{
	char *text = NULL;
	size_t length = 0;
	FILE *file = open_memstream(&text, &length);

	check(file != NULL, "open_memstream");
	fputs(PTX_HEAD, file);
	for (unsigned f = 0; f < functions; f++)
		fprintf(file, ".visible .entry scale_%u_%d(.param .u64 spin_ns) { ret; }\n", f, (int)getpid());
	fclose(file);
	return text;
}

static void launch(const CUfunction *functions, unsigned count, unsigned launches)
{
	unsigned long long ns = 1000;
	void *parameters[] = {&ns};

	for (unsigned f = 0; f < count; f++)
		for (unsigned i = 0; i < launches; i++)
			check(!cuLaunchKernel(functions[f], 1, 1, 1, 32, 1, 1, 0, NULL, parameters, NULL),
			      "cuLaunchKernel");
	check(!cuCtxSynchronize(), "cuCtxSynchronize");
}

/* The functions that it made and launched. */
static CUfunction *work(int ordinal, unsigned functions, unsigned launches)
{
	char *text = module_text(functions), name[64];
	CUfunction *made = calloc(functions, sizeof(*made));
	CUcontext context;
	CUmodule module;
	CUdevice device;

	check(made != NULL, "calloc");

	check(!cuInit(0) && !cuDeviceGet(&device, ordinal), "cuInit");
	check(!cuDevicePrimaryCtxRetain(&context, device) && !cuCtxSetCurrent(context), "cuDevicePrimaryCtxRetain");
	check(!cuModuleLoadData(&module, text), "cuModuleLoadData");
	for (unsigned f = 0; f < functions; f++) {
		snprintf(name, sizeof(name), "scale_%u_%d", f, (int)getpid());
		check(!cuModuleGetFunction(&made[f], module, name), name);
	}
	launch(made, functions, launches);
	free(text);
	return made;
}

static void await_word(int descriptor)
{
	char word;

	check(read(descriptor, &word, 1) == 1, "a process failed");
}

int main(int count, char **arguments)
{
	int worked[2];

	check(count == 9 && !pipe(worked), "usage");
	unsigned containers = (unsigned)atoi(arguments[2]), gpus = (unsigned)atoi(arguments[3]);
	unsigned processes = (unsigned)atoi(arguments[4]), at_once = (unsigned)atoi(arguments[5]), done = 0;
	bool works = strcmp(arguments[8], "work") == 0, hold = works || strcmp(arguments[8], "hold") == 0;

	for (unsigned p = 0; p < processes; p++) {
		if (p - done >= at_once) {
			await_word(worked[0]);
			done++;
		}
		while (waitpid(-1, NULL, WNOHANG) > 0)
			;
		pid_t child = fork();
		check(child >= 0, "fork");
		if (child)
			continue;
		char end;
		unsigned functions = (unsigned)atoi(arguments[6]), launches = (unsigned)atoi(arguments[7]);
		struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
		enter(arguments[1], p % containers);
		CUfunction *made = work((int)(p % gpus), functions, launches);
		if (!hold)
			usleep(LIFE_US);
		check(write(worked[1], "w", 1) == 1, "write");
		while (works && poll(&input, 1, PERIOD_MS) == 0)
			launch(made, functions, launches);
		if (hold && read(STDIN_FILENO, &end, 1) < 0)
			_exit(1);
		_exit(0);
	}
	close(worked[1]);
	for (; done < processes; done++)
		await_word(worked[0]);
	puts("worked");
	fflush(stdout);
	while (waitpid(-1, NULL, 0) > 0)
		;
	return 0;
}
