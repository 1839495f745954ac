// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * A program whose calls of one function are known. Reads a command a line, answers with a line for each outermost call
 * that returned: how long it took within the function and around it, in ns; then "done".
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static jmp_buf away;

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* How long it took within. `depth` more of it inside; `jump`: it does not return. */
__attribute__((noinline, noclone)) uint64_t handle_request(long us, int depth, int jump)
{
	uint64_t began_ns = now_ns();

	usleep(us);
	if (jump)
		longjmp(away, 1);
	if (depth)
		handle_request(us, depth - 1, 0);
	return now_ns() - began_ns;
}

__attribute__((noinline, noclone)) uint64_t handle_other(long us)
{
	uint64_t began_ns = now_ns();

	usleep(us);
	return now_ns() - began_ns;
}

static void jump_out(long us)
{
	if (!setjmp(away))
		handle_request(us, 0, 1);
}

static void report(uint64_t began_ns, uint64_t within_ns)
{
	printf("%llu %llu\n", (unsigned long long)within_ns, (unsigned long long)(now_ns() - began_ns));
}

static void *leave(void *us)
{
	usleep(*(long *)us);
	pthread_exit(NULL);
}

/* Its thread ends within the function. */
__attribute__((noinline, noclone)) void *handle_last(void *us)
{
	return leave(us);
}

static void *call_twice(void *us)
{
	for (int i = 0; i < 2; i++)
		handle_request(*(long *)us, 0, 0);
	return NULL;
}

static void thread(void *(*body)(void *), long us)
{
	pthread_t id;

	if (pthread_create(&id, NULL, body, &us) || pthread_join(id, NULL))
		abort();
}

static void act(const char *name, int times, long us, int depth)
{
	for (int i = 0; i < times; i++) {
		uint64_t began_ns = now_ns();

		if (!strcmp(name, "call"))
			report(began_ns, handle_request(us, depth, 0));
		else if (!strcmp(name, "other"))
			report(began_ns, handle_other(us));
		else if (!strcmp(name, "jump"))
			jump_out(us);
		else if (!strcmp(name, "exit_inside"))
			thread(handle_last, us);
		else if (!strcmp(name, "thread"))
			thread(call_twice, us);
	}
}

int main(void)
{
	char name[32];
	int times, depth;
	long us;

	setvbuf(stdout, NULL, _IOFBF, 1 << 16);
	puts("ready");
	fflush(stdout);
	while (scanf("%31s %d %ld %d", name, &times, &us, &depth) == 4) {
		act(name, times, us, depth);
		puts("done");
		fflush(stdout);
	}
	return 0;
}
