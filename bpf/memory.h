/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Memory by the calls that succeeded: what is live, per process, device and kind. What a context held goes with it.
 * Sizes are those that were asked for; what the driver rounds them up to is NVML's to say.
 */
#pragma once
#include "abi.h"

enum memory_kind {
	MEMORY_PLAIN,
	MEMORY_MANAGED,
	MEMORY_POOL,
	MEMORY_VIRTUAL, /* cuMemCreate */
	MEMORY_ARRAY,
	/*
	 * Of an executable graph: what its nodes allocate, less what they free, at its most in the order in which they
	 * were added. From its first launch until it is destroyed, as the driver keeps it for the next launch, whatever
	 * frees the addresses in between.
	 */
	MEMORY_GRAPH,
	MEMORY_PINNED, /* host memory: not in peak_bytes; what comes before is memory of a device */
	MEMORY_SPARE_7,
	MEMORY_KINDS,
};

enum memory_shape {
	ALLOC_POINTER_SIZE = 1, /* (out pointer, bytes, …) */
	ALLOC_PITCH, /* (out pointer, out pitch, width, height, …) */
	ALLOC_PHYSICAL, /* (out handle, bytes, const CUmemAllocationProp *, …): the property names the device */
	ALLOC_ARRAY, /* (out array, const CUDA_ARRAY_DESCRIPTOR *) */
	ALLOC_ARRAY_3D, /* (out array, const CUDA_ARRAY3D_DESCRIPTOR *) */
	ALLOC_MIPMAP, /* (out array, const CUDA_ARRAY3D_DESCRIPTOR *, levels) */
	ALLOC_REGISTER, /* (pointer, bytes, …) */
	FREE_POINTER, /* (pointer, …) */
};

/* The cookie's detail: kind, and whether sizes and device pointers have 32 bits (calls of CUDA 3.1 and before). */
#define MEMORY_KIND(detail) ((detail) & (MEMORY_KINDS - 1))
#define MEMORY_IS_NARROW(detail) (((detail) >> 8) & 1)

#define LOCATION_OFFSET 8 /* of `location` in CUmemAllocationProp */
#define LOCATION_DEVICE 1

struct location { /* CUmemLocation */
	__u32 type;
	__u32 id;
};

/* Handles of physical memory and arrays may be numerically equal to device addresses: each has a space of its own. */
enum memory_space { SPACE_ADDRESS, SPACE_HANDLE, SPACE_ARRAY, SPACE_HOST, SPACE_GRAPH };

struct allocation_key {
	struct process_id process;
	__u32 space;
	__u32 _pad;
	__u64 pointer;
};

struct allocation {
	__u64 bytes;
	__u64 at_ns;
	__u64 context; /* 0: of no context, or of one that was made before the probes were there */
	__u32 device;
	__u32 kind;
	__u32 references; /* of physical memory: handles and mappings */
	__u32 element_bytes; /* of an array */
};

/*
 * What is booked of a context, by its key: when it ends, its sums go and nothing is looked through. Its allocations stay
 * until user space looks for what is older than `ended_ns`, and are not booked a second time when they are freed.
 */
struct context_memory {
	__u64 live_bytes[MEMORY_KINDS];
	__u64 allocations; /* live */
	__u64 ended_ns; /* when a context of this handle ended last; 0: none did */
	__u32 device_plus_1; /* what is on another one is of no context; 0: nothing was allocated yet */
	__u32 _pad;
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
