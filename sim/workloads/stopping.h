/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* SIGTERM and SIGINT ask a workload to end; it ends at the next place where its figures are whole. */
#ifndef GPUWARDEN_WORKLOADS_STOPPING_H
#define GPUWARDEN_WORKLOADS_STOPPING_H

#include <signal.h>
#include <stddef.h>

static volatile sig_atomic_t stop_asked;

static inline void on_stop_signal(int signal_number)
{
	(void)signal_number;
	stop_asked = 1;
}

static inline void stop_on_signals(void)
{
	/* No SA_RESTART: sleeping and waiting for a byte have to end. */
	struct sigaction action = {.sa_handler = on_stop_signal};

	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
}

#endif
