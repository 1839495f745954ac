/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "kernels.h"

#include <math.h>

#include "arrivals.h"
#include "clock.h"
#include "options.h"

static const double WIDEST_RATIO = 3;
static const double LEAST_SHARE = 0.2; /* of what a function would have at most: none is too rare to matter */
static const uint64_t OTHER_STREAM = 0x5851f42d4c957f2d;

bool kernels_option(struct kernels *kernels, int letter, const char *text)
{
	switch (letter) {
	case 'u':
		kernels->length_us = option_number("--kernel-us", text, 0, 1e9);
		return true;
	case 'J':
		kernels->jitter_ratio = option_number("--jitter", text, 0, 1);
		return true;
	case 'b':
		kernels->shape.blocks = (unsigned)option_count("--blocks", text, 1, INT32_MAX);
		return true;
	case 't':
		kernels->shape.threads = (unsigned)option_count("--threads", text, 1, 1024);
		return true;
	case 'F':
		kernels->functions = (unsigned)option_count("--functions", text, 1, MOST_FUNCTIONS);
		return true;
	case 'R':
		kernels->drift_ratio = option_number("--drift", text, 0.001, 1000);
		return true;
	case 'W':
		kernels->drift_seconds = option_number("--drift-seconds", text, 0.001, 1e9);
		return true;
	case 'U':
		kernels->drift_jumps = true;
		return true;
	}
	return false;
}

static double drawn_ratio(uint64_t *random)
{
	return pow(WIDEST_RATIO, 2 * random_uniform(random) - 1);
}

void kernels_start(struct kernels *kernels, uint64_t seed)
{
	uint64_t random = seed ^ OTHER_STREAM; /* so that jitter does not depend on the number of functions */
	double sum = 0;

	kernels->variants[0] = (struct variant){1, 1, 1};
	for (unsigned i = 0; kernels->functions > 1 && i < kernels->functions; i++) {
		double share = LEAST_SHARE + (1 - LEAST_SHARE) * random_uniform(&random);

		sum += share;
		kernels->variants[i] = (struct variant){drawn_ratio(&random), drawn_ratio(&random), sum};
	}
	for (unsigned i = 0; kernels->functions > 1 && i < kernels->functions; i++)
		kernels->variants[i].cumulative /= sum;
	kernels->random = seed;
	kernels->started_ns = clock_now_ns();
}

static unsigned drawn_function(struct kernels *kernels)
{
	unsigned function = 0;

	if (kernels->functions > 1) {
		double at = random_uniform(&kernels->random);

		while (function + 1 < kernels->functions && at >= kernels->variants[function].cumulative)
			function++;
	}
	return function;
}

static double drifted(const struct kernels *kernels)
{
	double ways, part;

	if (kernels->drift_ratio == 1)
		return 1;
	ways = (double)(clock_now_ns() - kernels->started_ns) / 1e9 / kernels->drift_seconds;
	part = fmod(ways, 2);
	if (kernels->drift_jumps)
		return part < 1 ? 1 : kernels->drift_ratio;
	return pow(kernels->drift_ratio, part < 1 ? part : 2 - part);
}

struct kernel kernels_next(struct kernels *kernels)
{
	double off_ratio = kernels->jitter_ratio * (2 * random_uniform(&kernels->random) - 1);
	unsigned function = drawn_function(kernels);
	const struct variant *variant = &kernels->variants[function];
	double us = kernels->length_us * (1 + off_ratio) * variant->length_ratio * drifted(kernels);
	double blocks = round(kernels->shape.blocks * variant->blocks_ratio);

	return (struct kernel){
		.function = function,
		.shape = {.blocks = blocks < 1 ? 1 : (unsigned)blocks, .threads = kernels->shape.threads},
		.ns = (uint64_t)(us * 1e3),
	};
}
