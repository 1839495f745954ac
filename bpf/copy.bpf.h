/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The totals of copies, and how large a copy is by its arguments. */
#pragma once
#include "bounds.bpf.h"

static __always_inline void book_copies(const struct process_id *id, __u32 device, __u32 direction, __u64 bytes,
					__u64 calls)
{
	struct copy_key key = {.process = *id, .device = device, .direction = direction};
	struct copy_value initial = {};
	struct copy_value *value = find_or_add(&copies, &key, &initial, LOST_COPY);

	if (!value)
		return;
	__sync_fetch_and_add(&value->bytes, cut(bytes, MOST_BYTES));
	__sync_fetch_and_add(&value->calls, calls);
}

#define MEMORYTYPE_HOST 1
#define MEMORYTYPE_UNIFIED 4

/* Where a descriptor has what decides size and direction. */
struct descriptor {
	__u32 source_type, source, destination_type, destination, extent;
	__u32 dimensions;
	__u32 narrow;
};

struct sized_copy {
	__u64 bytes;
	__u64 source, destination; /* unified addresses: 0 where the type says what it is */
	__u32 direction;
	__u32 _pad;
};

/* A host pointer lies before the device's. */
static __always_inline __u32 host_before(__u32 type)
{
	return type == MEMORYTYPE_HOST ? 8 : 0;
}

static __always_inline void read_descriptor(struct sized_copy *copy, __u64 address, const struct descriptor *at)
{
	__u32 source_type = 0, destination_type = 0, narrow[3] = {0, 0, 1};
	__u64 extent[3] = {0, 0, 1};
	long failed;

	failed = bpf_probe_read_user(&source_type, 4, (void *)address + at->source_type);
	failed |= bpf_probe_read_user(&destination_type, 4, (void *)address + at->destination_type);
	if (at->narrow) {
		failed |= bpf_probe_read_user(narrow, at->dimensions == 3 ? 12 : 8, (void *)address + at->extent);
		copy->bytes = product(product(narrow[0], narrow[1]), narrow[2]);
	} else {
		failed |= bpf_probe_read_user(extent, at->dimensions == 3 ? 24 : 16, (void *)address + at->extent);
		copy->bytes = product(product(extent[0], extent[1]), extent[2]);
	}
	if (failed) {
		count_lost(LOST_USER_READ);
		return;
	}
	if (source_type == MEMORYTYPE_UNIFIED || destination_type == MEMORYTYPE_UNIFIED) {
		copy->direction = COPY_UNKNOWN;
		copy->source = read_result(address + at->source - host_before(source_type));
		copy->destination = read_result(address + at->destination - host_before(destination_type));
		/* a side that is named as device is asked for like the others: it is never readable */
	} else if (source_type == MEMORYTYPE_HOST) {
		copy->direction = destination_type == MEMORYTYPE_HOST ? COPY_UNKNOWN : COPY_HOST_TO_DEVICE;
	} else {
		copy->direction = destination_type == MEMORYTYPE_HOST ? COPY_DEVICE_TO_HOST : COPY_DEVICE_TO_DEVICE;
	}
}

static __always_inline int is_readable(__u64 address)
{
	__u8 byte;

	return bpf_probe_read_user(&byte, sizeof(byte), (void *)address) == 0;
}

static __always_inline __u32 unified_direction(__u64 destination, __u64 source)
{
	int from_host = is_readable(source), to_host = is_readable(destination);

	if (from_host && to_host)
		return COPY_UNKNOWN;
	if (from_host)
		return COPY_HOST_TO_DEVICE;
	return to_host ? COPY_DEVICE_TO_HOST : COPY_DEVICE_TO_DEVICE;
}
