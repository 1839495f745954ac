/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Requests and deliveries, from the waits. A request is the first launch after a drained wait until the return of the
 * wait that drains it. A delivery is the same stretch seen from the GPU: how much was launched, how long it took.
 */
#pragma once
#include "abi.h"

enum wait_shape {
	WAIT_CONTEXT = 1, /* (): for all streams */
	WAIT_STREAM, /* (stream) */
	WAIT_EVENT, /* (event) */
};

/* Log-linear histogram: 32 buckets per power of two from 2^10 ns to 2^40 ns; a bucket is at most 3.2 % wide. */
#define LATENCY_FIRST_POWER 10
#define LATENCY_POWERS 30
#define LATENCY_SUB_BITS 5
#define LATENCY_BUCKETS (LATENCY_POWERS << LATENCY_SUB_BITS)

struct latency {
	__u64 sum_ns;
	__u64 count;
	__u32 buckets[LATENCY_BUCKETS];
};

#define DELIVERIES 16
#define DELIVERED_FUNCTIONS 8

struct delivered_function {
	__u64 function;
	__u64 launches;
};

struct delivery {
	__u64 at_ns; /* when the wait returned */
	__u64 launches;
	__u64 charged_ns; /* Σ estimated duration of those launches */
	__u64 queued_ns; /* believed to be queued when the wait began */
	__u64 waited_ns; /* length of the wait … */
	__u64 waited_busy_ns; /* … of which an online request of another process was running */
	__u64 elapsed_ns; /* first launch to return of the wait … */
	__u64 elapsed_busy_ns; /* … of which an online request was running */
	__u64 pauses; /* stops in that stretch */
	struct delivered_function
		functions[DELIVERED_FUNCTIONS]; /* the first ones; the others are only in `launches` */
};

struct deliveries {
	__u64 count; /* ever; the newest is at (count − 1) % DELIVERIES */
	struct delivery ring[DELIVERIES];
};
