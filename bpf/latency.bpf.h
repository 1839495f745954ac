/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Log-linear latency histograms: which bucket, and how to add to one. */
#pragma once
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "wait.h"

static __always_inline __u32 latency_bucket(__u64 ns)
{
	__u32 power = 0;
	__u64 rest = ns >> LATENCY_FIRST_POWER;
	__u32 sub;

	/* floor(log2(rest)) without a loop */
#define STEP(bits)                                                                                                     \
	if (rest >> (bits)) {                                                                                          \
		power += (bits);                                                                                       \
		rest >>= (bits);                                                                                       \
	}
	STEP(32)
	STEP(16)
	STEP(8)
	STEP(4)
	STEP(2)
	STEP(1)
#undef STEP
	if (ns < (1ull << LATENCY_FIRST_POWER))
		return 0;
	if (power >= LATENCY_POWERS)
		return LATENCY_BUCKETS - 1;
	sub = (ns >> (power + LATENCY_FIRST_POWER - LATENCY_SUB_BITS)) & ((1 << LATENCY_SUB_BITS) - 1);
	return (power << LATENCY_SUB_BITS) | sub;
}

static __always_inline void add_latency(struct latency *latency, __u64 ns)
{
	__u32 bucket = latency_bucket(ns);

	if (bucket >= LATENCY_BUCKETS)
		return;
	__sync_fetch_and_add(&latency->count, 1);
	__sync_fetch_and_add(&latency->sum_ns, ns);
	__sync_fetch_and_add(&latency->buckets[bucket], 1);
}
