/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * No process is refused or evicted for what this says that it has: by a libcuda.so.1 of its own (pretended_cuda.c), in a
 * container without the GPU, it allocates 2 GiB and then launches and copies without an end.
 */
#include <cuda.h>
#include <stdio.h>
#include <unistd.h>

#define CLAIMED (2ul << 30)
#define COPIED (1ul << 30)

int main(void)
{
	CUcontext context;
	CUdeviceptr pointer;

	cuInit(0);
	usleep(500000); /* for the probes to be there */
	cuCtxCreate(&context, 0, 0);
	cuMemAlloc(&pointer, CLAIMED);
	puts("claimed");
	fflush(stdout);
	for (;;) {
		cuLaunchKernel((CUfunction)0x10, 132, 1, 1, 1024, 1, 1, 0, NULL, NULL, NULL);
		cuMemcpyHtoDAsync(pointer, &pointer, COPIED, NULL);
		usleep(1000);
	}
}
