/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What is believed of the arguments of calls: sizes, counts and ordinals are the caller's, and a library of its own says
 * success to anything. Whatever is booked is at most this, so that no sum wraps and no number of one process reaches
 * others; what is cut or not taken is counted. The bounds are powers of two.
 */
#pragma once
#include "maps.bpf.h"

#define MOST_BYTES (1ull << 46) /* 64 TiB: more than any device has, in one allocation or in all of a process */
#define MOST_KERNELS (1u << 20) /* of one launch of a graph; nodes of each other kind, too */
#define MOST_GRID_BLOCKS (1ull << 36) /* of one launch: a device is busy with them for tens of seconds */
#define MOST_ORDINALS 64 /* devices that a process may number */
#define MOST_ARRAY_SIDE (1ull << 18)
#define MOST_CHANNELS 16
#define BEYOND (MOST_BYTES + 1) /* a product that is more than all of these */

static __always_inline __u64 product(__u64 a, __u64 b)
{
	if (!a || !b)
		return 0;
	return a > BEYOND || b > BEYOND / a ? BEYOND : a * b;
}

/* A function of its own, so that the verifier looks at it once. */
__noinline __u64 cut(__u64 value, __u64 most)
{
	if (value <= most)
		return value;
	count_lost(LOST_BOUNDS);
	return most;
}

static __always_inline __u64 grid_blocks(__u32 x, __u32 y, __u32 z)
{
	__u64 layer = (__u64)x * y;
	__u64 blocks = layer >> 31 ? product(layer, z) : layer * z; /* nearly always without a division */

	return blocks <= MOST_GRID_BLOCKS ? blocks : cut(blocks, MOST_GRID_BLOCKS);
}

/* Without a bound a process could invent as many devices as fill the maps. */
static __always_inline __u32 known_ordinal(__u32 ordinal)
{
	if (ordinal < MOST_ORDINALS)
		return ordinal;
	if (ordinal != DEVICE_UNKNOWN)
		count_lost(LOST_ORDINAL);
	return DEVICE_UNKNOWN;
}
