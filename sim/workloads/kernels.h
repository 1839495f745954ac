/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Which kernels a workload launches: of how many functions, how long, with how many blocks. The same seed gives the same
 * kernels in the same order; only drift depends on the time.
 */
#ifndef GPUWARDEN_WORKLOADS_KERNELS_H
#define GPUWARDEN_WORKLOADS_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "gpu.h"

struct variant { /* how one function differs from what was asked for */
	double length_ratio, blocks_ratio;
	double cumulative; /* of the shares in the launches, up to and with this one */
};

struct kernels {
	double length_us, jitter_ratio;
	struct shape shape;
	unsigned functions;
	double drift_ratio, drift_seconds; /* length after so many seconds ÷ length at first; 1: none */
	bool drift_jumps; /* there and back at once instead of little by little */

	struct variant variants[MOST_FUNCTIONS];
	uint64_t random, started_ns;
};

struct kernel {
	unsigned function;
	struct shape shape;
	uint64_t ns; /* of each block */
};

#define KERNELS_DEFAULT(us)                                                                                            \
	{                                                                                                              \
		.length_us = (us), .shape = {.blocks = 132, .threads = 1024}, .functions = 1, .drift_ratio = 1,        \
		.drift_seconds = 30                                                                                    \
	}

/* For getopt_long; their letters are those that kernels_option knows. */
#define KERNELS_LONG_OPTIONS                                                                                           \
	{"kernel-us", required_argument, NULL, 'u'}, {"jitter", required_argument, NULL, 'J'},                         \
		{"blocks", required_argument, NULL, 'b'}, {"threads", required_argument, NULL, 't'},                   \
		{"functions", required_argument, NULL, 'F'}, {"drift", required_argument, NULL, 'R'},                  \
		{"drift-seconds", required_argument, NULL, 'W'},                                                       \
	{                                                                                                              \
		"drift-jumps", no_argument, NULL, 'U'                                                                  \
	}

#define KERNELS_USAGE                                                                                                  \
	"  --jitter R           each length is off by up to this ratio, 0 to 1 (default 0)\n"                          \
	"  --blocks B --threads T    of each launch (default 132 × 1024)\n"                                           \
	"  --functions N        launch N kernels, drawn with the seed: each 1/3 to 3 times as long, with 1/3 to 3\n"   \
	"                       times the blocks, and with a share in the launches (default 1: as said)\n"             \
	"  --drift F            lengths go to F times themselves and back (default 1)\n"                               \
	"  --drift-seconds S    one way takes so long (default 30); --drift-jumps: at once, after S seconds each\n"

/* Takes one option; false when it is none of these. */
bool kernels_option(struct kernels *kernels, int letter, const char *text);

/* Draws the functions, after the options and before the first kernel. */
void kernels_start(struct kernels *kernels, uint64_t seed);

/* The next kernel to launch. */
struct kernel kernels_next(struct kernels *kernels);

#endif
