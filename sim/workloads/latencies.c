/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "latencies.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const double UPPER_BOUNDS_S[BUCKETS] = {0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01,
					       0.0125, 0.015, 0.02,  0.025, 0.03,  0.04,  0.05,	 0.075, 0.1,
					       0.15,   0.2,   0.3,   0.5,   0.75,  1.0,	  2.0,	 5.0};

void latencies_add(struct latencies *latencies, double seconds)
{
	size_t bucket = 0;

	if (latencies->count == latencies->capacity) {
		latencies->capacity = latencies->capacity ? latencies->capacity * 2 : 1024;
		latencies->seconds = realloc(latencies->seconds, latencies->capacity * sizeof(*latencies->seconds));
		if (!latencies->seconds)
			abort();
	}
	latencies->seconds[latencies->count++] = seconds;
	latencies->sum_s += seconds;
	while (bucket < BUCKETS && seconds > UPPER_BOUNDS_S[bucket])
		bucket++;
	latencies->bucket_counts[bucket]++;
}

static int ascending(const void *left, const void *right)
{
	double a = *(const double *)left, b = *(const double *)right;

	return (a > b) - (a < b);
}

/* The nearest rank: a latency that some request really had. */
static double quantile(const double *sorted, size_t count, double q)
{
	double rank = ceil(q * (double)count);

	return sorted[rank < 1 ? 0 : (size_t)rank - 1];
}

void latencies_write_json(const struct latencies *latencies, FILE *file)
{
	size_t count = latencies->count;
	double *sorted;

	if (!count) {
		fputs("null", file);
		return;
	}
	sorted = malloc(count * sizeof(*sorted));
	if (!sorted)
		abort();
	memcpy(sorted, latencies->seconds, count * sizeof(*sorted));
	qsort(sorted, count, sizeof(*sorted), ascending);
	fprintf(file, "{\"p50\": %.9f, \"p90\": %.9f, \"p99\": %.9f, \"p999\": %.9f, \"max\": %.9f, \"mean\": %.9f}",
		quantile(sorted, count, 0.5), quantile(sorted, count, 0.9), quantile(sorted, count, 0.99),
		quantile(sorted, count, 0.999), sorted[count - 1], latencies->sum_s / (double)count);
	free(sorted);
}

void latencies_write_histogram(const struct latencies *latencies, const char *name, const char *help, FILE *file)
{
	uint64_t cumulative = 0;

	fprintf(file, "# HELP %s %s\n# TYPE %s histogram\n", name, help, name);
	for (int bucket = 0; bucket < BUCKETS; bucket++) {
		cumulative += latencies->bucket_counts[bucket];
		fprintf(file, "%s_bucket{le=\"%g\"} %lu\n", name, UPPER_BOUNDS_S[bucket], cumulative);
	}
	fprintf(file, "%s_bucket{le=\"+Inf\"} %zu\n", name, latencies->count);
	fprintf(file, "%s_sum %.9f\n%s_count %zu\n", name, latencies->sum_s, name, latencies->count);
}
