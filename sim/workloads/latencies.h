/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Durations of requests: every one kept for exact quantiles, and counted into classic Prometheus buckets.
 * Not thread-safe: threads that share one lock it.
 */
#ifndef GPUWARDEN_WORKLOADS_LATENCIES_H
#define GPUWARDEN_WORKLOADS_LATENCIES_H

#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

enum {
	BUCKETS = 26,
};

struct latencies {
	double *seconds; /* in the order of completion */
	size_t count, capacity;
	double sum_s;
	uint64_t bucket_counts[BUCKETS + 1]; /* not cumulative; the last one is +Inf */
};

void latencies_add(struct latencies *latencies, double seconds);

/* Writes {"p50": …, "p90": …, "p99": …, "p999": …, "max": …, "mean": …} in seconds, or null when there are none. */
void latencies_write_json(const struct latencies *latencies, FILE *file);

/* Writes one histogram in Prometheus' text format. */
void latencies_write_histogram(const struct latencies *latencies, const char *name, const char *help, FILE *file);

#endif
