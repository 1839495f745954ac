/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "arrivals.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* SplitMix64 (Steele, Lea, Flood 2014): small, seedable with any number, the same everywhere. */
double random_uniform(uint64_t *state)
{
	uint64_t mixed = (*state += 0x9e3779b97f4a7c15);

	mixed = (mixed ^ (mixed >> 30)) * 0xbf58476d1ce4e5b9;
	mixed = (mixed ^ (mixed >> 27)) * 0x94d049bb133111eb;
	mixed ^= mixed >> 31;
	return (double)(mixed >> 11) * 0x1p-53;
}

void arrivals_poisson(struct arrivals *arrivals, double rate_per_second, uint64_t seed)
{
	*arrivals = (struct arrivals){.rate_per_second = rate_per_second, .random = seed};
}

void arrivals_periodic(struct arrivals *arrivals, double period_s, uint64_t seed)
{
	*arrivals = (struct arrivals){.period_s = period_s, .random = seed};
	arrivals->last_s = (random_uniform(&arrivals->random) - 1) * period_s;
}

void arrivals_trace(struct arrivals *arrivals, const char *path)
{
	*arrivals = (struct arrivals){.trace = fopen(path, "re")};
	if (!arrivals->trace) {
		fprintf(stderr, "cannot open the trace %s: %m\n", path);
		exit(2);
	}
}

static bool next_in_trace(struct arrivals *arrivals, double *arrival_s)
{
	char line[128], *end;

	if (!fgets(line, sizeof(line), arrivals->trace))
		return false;
	*arrival_s = strtod(line, &end);
	if (end == line || strspn(end, " \t\r\n") != strlen(end) || !(*arrival_s >= arrivals->last_s)) {
		fprintf(stderr, "the trace must be one ascending number of seconds per line, not: %s\n", line);
		exit(2);
	}
	arrivals->last_s = *arrival_s;
	return true;
}

bool arrivals_next(struct arrivals *arrivals, double *arrival_s)
{
	if (arrivals->trace)
		return next_in_trace(arrivals, arrival_s);
	if (arrivals->period_s > 0) {
		*arrival_s = arrivals->last_s += arrivals->period_s;
		return true;
	}
	if (arrivals->rate_per_second <= 0)
		return false;
	arrivals->last_s -= log1p(-random_uniform(&arrivals->random)) / arrivals->rate_per_second;
	*arrival_s = arrivals->last_s;
	return true;
}
