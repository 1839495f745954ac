/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Calls of one function in the processes of watched containers. enforce/signals/uprobe.py mirrors it. */
#pragma once

#ifndef __bpf__
#include <linux/types.h>
#endif

/* Index of the map `tallies`: why a call was not recorded. */
enum call_tally {
	CALL_ABANDONED, /* it never returned: an exception, longjmp, or another stack */
	CALL_FULL, /* a map was full */
	CALL_TALLIES,
};

/* A process whose calls count: under which watch, and only those that the probe of this target sees. */
struct watched {
	__u32 watch;
	__u32 target;
};
