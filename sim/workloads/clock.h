/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Monotonic time in nanoseconds, and sleeping until a point of it. */
#ifndef GPUWARDEN_WORKLOADS_CLOCK_H
#define GPUWARDEN_WORKLOADS_CLOCK_H

#include <stdint.h>
#include <time.h>

static const uint64_t NS_PER_SECOND = 1000000000;

static inline uint64_t clock_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * NS_PER_SECOND + (uint64_t)now.tv_nsec;
}

/* Returns early when a signal arrives. */
static inline void clock_sleep_until_ns(uint64_t until_ns)
{
	struct timespec until = {
		.tv_sec = (time_t)(until_ns / NS_PER_SECOND),
		.tv_nsec = (long)(until_ns % NS_PER_SECOND),
	};

	clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
}

#endif
