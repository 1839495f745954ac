/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Bytes copied, by direction. Where the symbol or its descriptor names the direction it is counted at entry. A copy of
 * unified addresses (cuMemcpy) is counted at its return: host memory can be read from the CPU then, device memory never
 * can, so which pointer is readable tells the direction; both readable (managed memory) stays COPY_UNKNOWN.
 */
#pragma once
#include "abi.h"

enum copy_direction {
	COPY_HOST_TO_DEVICE,
	COPY_DEVICE_TO_HOST,
	COPY_DEVICE_TO_DEVICE,
	COPY_UNKNOWN,
	COPY_MEMSET,
	COPY_LOCAL, /* how many there are of one device; graphs know no others */
	COPY_TO_PEER = COPY_LOCAL, /* of the device that the bytes come from: to another device, over PCIe or NVLink */
	COPY_FROM_PEER, /* of the one that they go to */
	COPY_DIRECTIONS,
};

/* Arguments by position, from 1. NARROW: 32-bit sizes and device pointers, as in the calls of CUDA 3.1 and before. */
enum copy_shape {
	COPY_BYTES_2 = 1, /* bytes in the second argument */
	COPY_BYTES_3,
	COPY_BYTES_4,
	COPY_BYTES_5,
	COPY_2D, /* (const CUDA_MEMCPY2D *) */
	COPY_2D_NARROW,
	COPY_3D, /* (const CUDA_MEMCPY3D *) */
	COPY_3D_NARROW,
	COPY_ELEMENTS, /* (pointer, value, count) of as many bytes as the cookie says */
	COPY_ELEMENTS_2D, /* (pointer, pitch, value, width, height) */
	COPY_UNIFIED, /* (destination, source, bytes) */
	COPY_BATCH, /* (destinations, sources, sizes, count, …) */
	COPY_PREFETCH, /* (pointer, bytes, device) */
	COPY_PREFETCH_2, /* (pointer, bytes, location) */
	COPY_BATCH_3D, /* (count, CUDA_MEMCPY3D_BATCH_OP *, …) */
	COPY_OPERATION_3D, /* (CUDA_MEMCPY3D_BATCH_OP *, …) */
	COPY_PEER, /* (destination, context, source, context, bytes) */
	COPY_3D_PEER, /* (const CUDA_MEMCPY3D_PEER *) */
	COPY_PREFETCHES, /* (pointers, sizes, count, locations, the first that each is for, how many, …) */
};

/* The cookie's detail: direction, bytes per element, flags. */
#define COPY_DIRECTION(detail) ((detail)&0xff)
#define COPY_ELEMENT(detail) (((detail) >> 8) & 0xff)
#define COPY_IS_NARROW(detail) (((detail) >> 16) & 1)

#define MOST_OF_BATCH 64

struct copy_key {
	struct process_id process;
	__u32 device;
	__u32 direction;
};

struct copy_value {
	__u64 bytes;
	__u64 calls;
};
