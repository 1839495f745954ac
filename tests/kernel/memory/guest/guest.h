/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#pragma once
#include <stddef.h>

/* Shared by the program that allocates and the one that watches it. */
struct arrivals {
	volatile int entered; /* calls of cuMemAlloc that the driver really got */
	volatile unsigned long long bytes;
	volatile unsigned long long freed;
};

extern struct arrivals *arrivals;

int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes);
int cuMemFree_v2(unsigned long long pointer);
