// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * It is reported as unprobed within seconds, and where its rule says so it is frozen while an online service needs the GPU.
 *
 * The library's exports are stubs that go on through a table (drivers 470 to 555, x86-64). For launches it reads its own
 * table and goes where the stub would: no probe sees one, whatever else it calls.
 */
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include "rounds.h"

enum {
	COMPARE_BYTES = 10, /* cmpl $imm32, disp32(%rip) */
	JUMP_IF_BYTES = 2,
	JUMP_BYTES = 6, /* jmp *disp32(%rip) */
	JUMP_OPERAND = 2,
};

static const uint64_t KERNEL_NS = 2000000;

void *target; /* of the launches of workloads/gpu.c, as this program's name comes before the library's */
__asm__(".globl cuLaunchKernel\n.type cuLaunchKernel, @function\ncuLaunchKernel:\njmp *target(%rip)\n");

/* Where the stub goes on. What a probe has written over its instructions is not read. */
static void *behind(const unsigned char *stub)
{
	const unsigned char *jump = stub + COMPARE_BYTES + JUMP_IF_BYTES;
	void *found;
	int distance;

	memcpy(&distance, jump + JUMP_OPERAND, sizeof(distance));
	memcpy(&found, jump + JUMP_BYTES + distance, sizeof(found));
	return found;
}

int main(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW), *stub = library ? dlsym(library, "cuLaunchKernel") : NULL;
	struct gpu gpu;

	if (!stub)
		return 1;
	target = behind(stub);
	gpu_open(&gpu, 0, 1);
	gpu_calibrate(&gpu, WHOLE_DEVICE);
	work_in_rounds(&gpu, KERNEL_NS, NULL);
}
