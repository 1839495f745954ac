// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * It is reported as unprobed within seconds, and where its rule says so it is frozen while an online service needs the GPU.
 *
 * The driver library is linked into this program, which exports none of its calls: no probe sees a launch.
 */
#include <stdio.h>

#include "workloads/gpu.h"

static const struct shape WHOLE_DEVICE = {132, 1024};
static const uint64_t KERNEL_NS = 2000000;
enum { AT_ONCE = 20 };

int main(void)
{
	struct gpu gpu;

	gpu_open(&gpu, 0, 1);
	gpu_calibrate(&gpu, WHOLE_DEVICE);
	for (unsigned long rounds = 1;; rounds++) {
		for (int kernel = 0; kernel < AT_ONCE; kernel++)
			gpu_spin(&gpu, 0, WHOLE_DEVICE, KERNEL_NS);
		gpu_wait(&gpu);
		printf("%lu\n", rounds * AT_ONCE);
		fflush(stdout);
	}
}
