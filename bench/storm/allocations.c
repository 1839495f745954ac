/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * An offline program that wants more memory than its quota, over and over. `allocations FILE PIECES MIB`: in each round it
 * allocates that many pieces of so many MiB, as far as it gets, and frees them. FILE has, as two numbers of 64 bits, how
 * many rounds got all of them and how many allocations were refused.
 */
#include <cuda.h>

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
	MOST_PIECES = 1024,
	PAUSE_US = 2000,
};

struct progress {
	uint64_t whole, refused;
};

static struct progress *open_progress(const char *path)
{
	struct progress *progress;
	int fd = open(path, O_RDWR | O_CREAT, 0644);

	if (fd < 0 || ftruncate(fd, sizeof(*progress)) < 0)
		exit(1);
	progress = mmap(NULL, sizeof(*progress), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (progress == MAP_FAILED)
		exit(1);
	return progress;
}

int main(int argc, char **argv)
{
	CUdeviceptr pieces[MOST_PIECES];
	CUcontext context;
	struct progress *progress;
	int most;
	size_t bytes;

	if (argc != 4 || (most = atoi(argv[2])) > MOST_PIECES)
		return 2;
	progress = open_progress(argv[1]);
	bytes = (size_t)atoi(argv[3]) << 20;
	if (cuInit(0) || cuCtxCreate(&context, 0, 0))
		return 1;
	puts("ready");
	fflush(stdout);
	for (;;) {
		int held = 0;

		while (held < most && cuMemAlloc(&pieces[held], bytes) == CUDA_SUCCESS)
			held++;
		if (held == most)
			progress->whole++;
		else
			progress->refused++;
		while (held)
			cuMemFree(pieces[--held]);
		usleep(PAUSE_US);
	}
}
