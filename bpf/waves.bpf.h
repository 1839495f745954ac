/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* How many SMs a grid keeps busy while it runs, as agent/attribution/contention.py works it out for a mean grid. */
#pragma once
#include "maps.bpf.h"

#define THREADS_PER_SM 2048
#define BLOCKS_PER_SM 32

struct waves {
	__u64 count;
	__u64 sms; /* that each keeps busy, summed */
};

/* Blocks are spread over the SMs first and stacked then. None where the SM count or the grid is unknown. */
static __always_inline struct waves waves_of(__u64 blocks, __u32 threads_per_block)
{
	__u32 zero = 0, *sm_count = bpf_map_lookup_elem(&sm_counts, &zero);
	__u64 sms = sm_count ? *sm_count : 0, per_sm, in_wave, rest;
	struct waves waves = {};

	if (!sms || !blocks || !threads_per_block)
		return waves;
	per_sm = THREADS_PER_SM / threads_per_block;
	per_sm = per_sm < 1 ? 1 : per_sm > BLOCKS_PER_SM ? BLOCKS_PER_SM : per_sm;
	in_wave = sms * per_sm;
	waves.count = blocks < in_wave ? 0 : blocks / in_wave; /* a division takes as long as all the rest */
	rest = blocks - waves.count * in_wave;
	waves.sms = waves.count * sms;
	if (rest) {
		waves.count++;
		waves.sms += rest < sms ? rest : sms;
	}
	return waves;
}
