/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Device memory by the calls that succeeded: what is live, per process, device and kind. */
#pragma once
#include "abi.h"

enum memory_kind {
	MEMORY_PLAIN,
	MEMORY_MANAGED,
	MEMORY_POOL,
	MEMORY_VIRTUAL, /* cuMemCreate */
	MEMORY_KINDS,
};

enum memory_shape {
	ALLOC_POINTER_SIZE = 1, /* (out pointer, bytes, …) */
	ALLOC_PITCH, /* (out pointer, out pitch, width, height, …) */
	FREE_POINTER, /* (pointer, …) */
	ALLOC_PHYSICAL, /* (out handle, bytes, const CUmemAllocationProp *, …): the property names the device */
};

#define LOCATION_OFFSET 8 /* of `location` in CUmemAllocationProp */
#define LOCATION_DEVICE 1

struct location { /* CUmemLocation */
	__u32 type;
	__u32 id;
};

struct allocation_key {
	struct process_id process;
	__u64 pointer;
};

struct allocation {
	__u64 bytes;
	__u64 at_ns;
	__u32 device;
	__u32 kind;
};

struct memory_key {
	struct process_id process;
	__u32 device;
	__u32 _pad;
};

struct memory_value {
	__u64 live_bytes[MEMORY_KINDS];
	__u64 allocations;
	__u64 frees;
	__u64 failures;
	__u64 peak_bytes;
};
