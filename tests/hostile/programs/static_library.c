// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * It is reported as unprobed within seconds, and where its rule says so it is frozen while an online service needs the GPU.
 *
 * The driver library is linked into this program, which exports none of its calls: no probe sees a launch.
 */
#include "rounds.h"

static const uint64_t KERNEL_NS = 2000000;
int main(void)
{
	struct gpu gpu;

	gpu_open(&gpu, 0, 1);
	gpu_calibrate(&gpu, WHOLE_DEVICE);
	work_in_rounds(&gpu, KERNEL_NS, NULL);
}
