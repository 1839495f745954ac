// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * Its launches are counted again within seconds, whatever library it calls.
 *
 * It works with the driver library for some seconds, so that it is known, and then with a copy of it: HOW is
 *   path   the copy is FILE, opened beside the first one,
 *   memfd  the same without a path,
 *   over   the copy's code is mapped over the first one's, at the same addresses.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <fcntl.h>
#include <unistd.h>

#include "workloads/clock.h"
#include "workloads/gpu.h"

static const struct shape WHOLE_DEVICE = {132, 1024};
static const uint64_t KERNEL_NS = 2000000, KNOWN_AFTER_NS = 3000000000u;
enum { AT_ONCE = 20 };

/* gpu.c calls these, and they call whatever library is in use. */
#if defined(__x86_64__)
#define JUMP(name) "jmp *in_use_" #name "(%rip)\n"
#else
#define JUMP(name) "adrp x16, in_use_" #name "\nldr x16, [x16, :lo12:in_use_" #name "]\nbr x16\n"
#endif
#define CALL(name)                                                                                                     \
	void *in_use_##name;                                                                                           \
	__asm__(".globl " #name "\n.type " #name ", @function\n" #name ":\n" JUMP(name));
#define CALLS(DO)                                                                                                      \
	DO(cuInit)                                                                                                     \
	DO(cuDeviceGet)                                                                                                \
	DO(cuDeviceGetAttribute)                                                                                       \
	DO(cuDevicePrimaryCtxRetain)                                                                                   \
	DO(cuCtxSetCurrent)                                                                                            \
	DO(cuModuleLoadData)                                                                                           \
	DO(cuModuleGetFunction)                                                                                        \
	DO(cuStreamCreate)                                                                                             \
	DO(cuLaunchKernel)                                                                                             \
	DO(cuStreamSynchronize)                                                                                        \
	DO(cuGetErrorName)                                                                                             \
	DO(cuStreamBeginCapture_v2)                                                                                    \
	DO(cuStreamEndCapture)                                                                                         \
	DO(cuGraphInstantiateWithFlags)                                                                                \
	DO(cuGraphDestroy)
CALLS(CALL)

static void require(int holds, const char *what)
{
	if (!holds) {
		perror(what);
		exit(1);
	}
}

static void use(const char *path)
{
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

	if (!library)
		fprintf(stderr, "%s\n", dlerror());
	require(library != NULL, path);
#define FIND(name) require((in_use_##name = dlsym(library, #name)) != NULL, #name);
	CALLS(FIND)
}

static void work_once(struct gpu *gpu, unsigned long *launches)
{
	for (int kernel = 0; kernel < AT_ONCE; kernel++)
		gpu_spin(gpu, 0, WHOLE_DEVICE, KERNEL_NS);
	gpu_wait(gpu);
	printf("%lu\n", *launches += AT_ONCE);
	fflush(stdout);
}

/* The first library's code: where it is mapped, and its path. */
static int code_of(char *path, unsigned long *start, unsigned long *end, unsigned long *offset)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[4096], flags[5];

	while (maps && fgets(line, sizeof(line), maps))
		if (sscanf(line, "%lx-%lx %4s %lx %*s %*s %4000[^\n]", start, end, flags, offset, path) == 5 &&
		    strchr(flags, 'x') && strstr(path, "libcuda.so"))
			return 1;
	return 0;
}

static void copy_to(int to, const char *path)
{
	int from = open(path, O_RDONLY);
	struct stat facts;

	require(from >= 0 && to >= 0 && !fstat(from, &facts), path);
	for (off_t done = 0; done < facts.st_size;)
		require(sendfile(to, from, &done, (size_t)(facts.st_size - done)) > 0, "sendfile");
	close(from);
}

int main(int argc, char **argv)
{
	unsigned long launches = 0, start, end, offset;
	uint64_t began_ns = clock_now_ns();
	char path[4096] = "", memory[64];
	struct gpu gpu;
	int copy;

	require(argc == 3, "HOW FILE");
	use("libcuda.so.1");
	gpu_open(&gpu, 0, 1);
	gpu_calibrate(&gpu, WHOLE_DEVICE);
	while (clock_now_ns() - began_ns < KNOWN_AFTER_NS)
		work_once(&gpu, &launches);
	require(code_of(path, &start, &end, &offset), "the first library");
	copy = strcmp(argv[1], "memfd") ? open(argv[2], O_RDWR | O_CREAT, 0755) : memfd_create(argv[2], 0);
	copy_to(copy, path);
	snprintf(memory, sizeof(memory), "/proc/self/fd/%d", copy);
	if (!strcmp(argv[1], "over")) {
		require(mmap((void *)start, end - start, PROT_READ | PROT_EXEC, MAP_PRIVATE | MAP_FIXED, copy,
			     (off_t)offset) != MAP_FAILED,
			"mmap");
	} else {
		use(strcmp(argv[1], "memfd") ? argv[2] : memory);
		gpu_open(&gpu, 0, 1);
		gpu_calibrate(&gpu, WHOLE_DEVICE);
	}
	printf("second\n");
	for (;;)
		work_once(&gpu, &launches);
}
