// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/* http ROUNDS: ns per system call of three kinds, a line each time that a line is read. */
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static double now_ns(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e9 + time.tv_nsec;
}

static double measure(void (*call)(void), int rounds)
{
	double began = now_ns();

	for (int i = 0; i < rounds; i++)
		call();
	return (now_ns() - began) / rounds;
}

static int pair[2];

static void call_nothing(void)
{
	syscall(SYS_getppid);
}

static void call_failing(void)
{
	syscall(SYS_close, -1);
}

static void call_sockets(void)
{
	char bytes[64] = "";

	if (write(pair[0], bytes, sizeof(bytes)) != sizeof(bytes) || read(pair[1], bytes, sizeof(bytes)) < 1)
		exit(1);
}

int main(int count, char **arguments)
{
	int rounds = count > 1 ? atoi(arguments[1]) : 1000;
	char line[16];

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		return 1;
	while (fgets(line, sizeof(line), stdin)) {
		printf("%f %f %f\n", measure(call_nothing, rounds), measure(call_failing, rounds),
		       measure(call_sockets, rounds / 4) / 2);
		fflush(stdout);
	}
	return 0;
}
