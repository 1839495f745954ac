/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * A program that can be checkpointed: it has nothing but three files open. It prints "ready", and for each SIGUSR1
 * allocates as often as its argument says and prints "called".
 */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>

int cuMemAlloc_v2(unsigned long long *address, size_t bytes);

int main(int count, char **arguments)
{
	long calls = count > 1 ? atol(arguments[1]) : 1;
	unsigned long long address;
	sigset_t begin;
	int received;

	sigemptyset(&begin);
	sigaddset(&begin, SIGUSR1);
	sigprocmask(SIG_BLOCK, &begin, NULL);
	setvbuf(stdout, NULL, _IOLBF, 0);
	puts("ready");
	while (!sigwait(&begin, &received)) {
		for (long i = 0; i < calls; i++)
			cuMemAlloc_v2(&address, 1);
		puts("called");
	}
	return 1;
}
