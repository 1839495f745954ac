/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Physical memory (cuMemCreate) lives until its last handle is released and its last mapping is gone. What another
 * process made counts there and not where it is imported.
 */
#pragma once
#include "abi.h"

enum mapping_shape {
	MAPPING_HANDLE = 1, /* (out handle, …): one more of memory that is there already */
	MAPPING_MAP, /* (address, bytes, offset, handle, …) */
	MAPPING_UNMAP, /* (address, bytes): one mapping, or several that lie one behind the other */
};

struct mapping_key {
	struct process_id process;
	__u64 address;
};

struct mapping {
	__u64 bytes;
	__u64 handle;
	__u64 allocated_ns; /* when its memory was: what sets it apart from later memory of the same handle */
	__u64 at_ns;
};
