/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Two calls of a driver, for a guest that has no GPU, not even a simulated one: it counts the calls. */
#include "guest.h"

struct arrivals *arrivals;

int cuMemAlloc_v2(unsigned long long *pointer, size_t bytes)
{
	*pointer = 4096ull * __sync_add_and_fetch(&arrivals->entered, 1);
	arrivals->bytes += bytes;
	return 0;
}

int cuMemFree_v2(unsigned long long pointer)
{
	arrivals->freed = pointer;
	return 0;
}
