/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * When requests arrive, as seconds since the start: a Poisson process, once a period, or a recorded trace. The same seed gives the same
 * arrivals on every machine, so that two runs can be compared request by request.
 */
#ifndef GPUWARDEN_WORKLOADS_ARRIVALS_H
#define GPUWARDEN_WORKLOADS_ARRIVALS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

struct arrivals {
	FILE *trace; /* NULL: Poisson */
	double rate_per_second;
	double period_s; /* 0: not periodic */
	double last_s;
	uint64_t random;
};

/* A uniform number in [0, 1); advances the state. */
double random_uniform(uint64_t *state);

void arrivals_poisson(struct arrivals *arrivals, double rate_per_second, uint64_t seed);

/* Once a period; the first at a time within one that the seed gives. */
void arrivals_periodic(struct arrivals *arrivals, double period_s, uint64_t seed);

/* One arrival per line, in seconds, ascending. Ends the program when the file cannot be opened. */
void arrivals_trace(struct arrivals *arrivals, const char *path);

/* False when there are no more. A trace that is not ascending numbers ends the program. */
bool arrivals_next(struct arrivals *arrivals, double *arrival_s);

#endif
