/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Turns: on a device one request of a periodic process runs at a time. A process whose request begins (the first launch
 * after a drained wait) while another one's runs, or while others wait, is stopped at that launch. The wait that drains
 * a request gives the turn back, and the guardian gives it to the waiting request whose deadline is the earliest.
 *
 * Between requests and not between launches: what is launched is on the device already, where contexts then share the
 * time, so that a request that overtakes another one would wait for everything that was ever overtaken.
 */
#pragma once
#include "abi.h"

/* One per device. */
struct turn {
	__u64 owner; /* start_ticks << 32 | tgid of the process whose request runs; 0: none does */
	__u64 since_ns; /* when it got the turn */
	__u64 until_ns; /* when that counts as over, whatever the process does; only the guardian goes by it */
	__u64 waiting; /* processes stopped until their turn; written by the guardian */
};

#define SERVED 16

/* Requests of one periodic process. */
struct periodic {
	__u64 requests; /* that ended, ever … */
	__u64 misses; /* … and later than their deadline */
	__u64 worst_late_ns;
	__u64 served; /* that ended with a turn, ever */
	__u64 served_ns[SERVED]; /* how long they had it; the newest is at (served − 1) % SERVED */
};
