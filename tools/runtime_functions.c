/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * A libcuda.so.1 that writes down which functions it is asked for, a line each on standard error: the name, the version of
 * CUDA, and the flags of cuGetProcAddress. It has no device: cuInit and whatever else is called say so.
 */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum { NO_DEVICE = 100, NEWEST_CUDA = 99990, SECOND_FORM = 12000 };

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags);
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status);

int cuDriverGetVersion(int *version)
{
	*version = NEWEST_CUDA;
	return 0;
}

int cuInit(unsigned flags)
{
	(void)flags;
	return NO_DEVICE;
}

static int no_device(void)
{
	return NO_DEVICE;
}

static void *answer(const char *name, int version)
{
	if (strcmp(name, "cuGetProcAddress") == 0)
		return version >= SECOND_FORM ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress;
	return strcmp(name, "cuDriverGetVersion") == 0 ? (void *)cuDriverGetVersion : (void *)no_device;
}

int cuGetProcAddress(const char *name, void **function, int version, uint64_t flags)
{
	if (name[0]) /* without a name: whether the call works at all */
		fprintf(stderr, "%s %d %llu\n", name, version, (unsigned long long)flags);
	*function = answer(name, version);
	return 0;
}

int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status)
{
	if (status)
		*status = 0;
	return cuGetProcAddress(name, function, version, flags);
}
