/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Burns CPU time without a call to CUDA: `burn THREADS`, until it is killed. */
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static void *burn(void *unused)
{
	volatile unsigned long turns = 0;

	for (;;)
		turns++;
	return unused;
}

int main(int argc, char **argv)
{
	pthread_t thread;

	for (int left = argc > 1 ? atoi(argv[1]) : 1; left > 0; left--)
		if (pthread_create(&thread, NULL, burn, NULL))
			return 1;
	for (;;)
		pause();
}
