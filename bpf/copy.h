/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Bytes copied, by direction as the symbol names it. Counted at entry: the size is an argument. */
#pragma once
#include "abi.h"

enum copy_direction {
	COPY_HOST_TO_DEVICE,
	COPY_DEVICE_TO_HOST,
	COPY_DEVICE_TO_DEVICE,
	COPY_UNKNOWN, /* cuMemcpy: unified addressing, the pointers decide */
	COPY_MEMSET,
};

enum copy_shape {
	COPY_BYTES_3 = 1, /* bytes in the third argument */
	COPY_BYTES_5, /* cuMemcpyPeer */
	COPY_2D, /* (const CUDA_MEMCPY2D *) */
	COPY_ELEMENTS_1, /* (pointer, value, count) of 1, 2 and 4 bytes */
	COPY_ELEMENTS_2,
	COPY_ELEMENTS_4,
	COPY_BYTES_2, /* cuMemPrefetchAsync */
};

struct copy_key {
	struct process_id process;
	__u32 device;
	__u32 direction;
};

struct copy_value {
	__u64 bytes;
	__u64 calls;
};
