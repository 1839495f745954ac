// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/* Work without an end: kernels that fill the device, some at once and then a wait; prints how many ran. */
#ifndef GPUWARDEN_HOSTILE_ROUNDS_H
#define GPUWARDEN_HOSTILE_ROUNDS_H

#include <stdio.h>

#include "workloads/gpu.h"

enum { AT_ONCE = 20 };

static const struct shape WHOLE_DEVICE = {132, 1024};

/* `after`: called after each launch; NULL: nothing is. */
static inline void work_in_rounds(struct gpu *gpu, uint64_t kernel_ns, void (*after)(void))
{
	for (unsigned long rounds = 1;; rounds++) {
		for (int kernel = 0; kernel < AT_ONCE; kernel++) {
			gpu_spin(gpu, 0, WHOLE_DEVICE, kernel_ns);
			if (after)
				after();
		}
		gpu_wait(gpu);
		printf("%lu\n", rounds * AT_ONCE);
		fflush(stdout);
	}
}

#endif
