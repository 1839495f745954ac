// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * Its launches are counted as they run, and charged with what they take: what it does to streams that are idle changes
 * neither. `idle_streams HOW`, without an end, while it works in one stream:
 *   waits     it waits for another stream, and for an event of it, after each launch
 *   captures  it captures into another stream all the while
 */
#include <stdlib.h>
#include <string.h>

#include "rounds.h"

static const uint64_t KERNEL_NS = 500000;

static CUstream idle;
static CUevent old;

static void wait_for_idle(void)
{
	cuda_check(cuStreamSynchronize(idle), "cuStreamSynchronize");
	cuda_check(cuEventSynchronize(old), "cuEventSynchronize");
}

int main(int argc, char **argv)
{
	int waits = argc == 2 && !strcmp(argv[1], "waits");
	struct gpu gpu;

	gpu_open(&gpu, 0, 1);
	gpu_calibrate(&gpu, WHOLE_DEVICE);
	cuda_check(cuStreamCreate(&idle, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
	cuda_check(cuEventCreate(&old, CU_EVENT_DEFAULT), "cuEventCreate");
	cuda_check(cuEventRecord(old, idle), "cuEventRecord");
	if (!waits)
		cuda_check(cuStreamBeginCapture(idle, CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
	work_in_rounds(&gpu, KERNEL_NS, waits ? wait_for_idle : NULL);
}
