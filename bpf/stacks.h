/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* User stacks of launches and of live allocations, for the processes of one container. agent/stacks/sampler.py mirrors it. */
#pragma once

#ifndef __bpf__
#include <linux/types.h>
#endif

#define STACK_FRAMES 127

/* Index of the map `tallies`: first what was seen, then why something was not recorded. */
enum tally {
	TALLY_SEEN, /* calls of the kind that is sampled */
	TALLY_SAMPLED,
	TALLY_COLLISION, /* two stacks, one slot of the stack map */
	TALLY_NO_STACK, /* the kernel could not read the stack */
	TALLY_FULL, /* a map was full */
	TALLY_UNREADABLE, /* an argument in user memory could not be read */
	TALLIES,
};

/* `caller`: where the probed call returns to. Kernels before 6.12 leave that frame out of a stack at a function's entry. */
struct stack_key {
	__u32 tgid;
	__s32 stack;
	__u64 caller;
};

struct live_key {
	__u64 pointer;
	__u32 tgid;
	__u32 _pad;
};

struct live {
	struct stack_key stack;
	__u64 bytes;
};
