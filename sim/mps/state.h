/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What the commands share: which release they are to answer as, what the simulated GPU knows of MPS, and who asks.
 * Like the real program they report errors as text on standard output, and with exit code 0.
 */
#pragma once

#include <stdbool.h>

#include "../query.h"

#define THOUSANDTHS 1000 /* of a percent: how the GPU's server keeps percentages */

/* A line of the answer. Returns false, so that a refusal is `return say(…)`. */
__attribute__((format(printf, 1, 2))) bool say(const char *format, ...);

/* $GPUSIM_MPS_VERSION: 535, 550, 555 or 580 (also when it is not set); 0 for anything else. */
int release(void);

/* Whether the user is root, or the one who started the daemon. */
bool privileged(void);

/* These return false when there is no answer, having said why. */
bool ask(int server, struct query *query, void **items, unsigned *count);
bool get_status(int server, struct mps_status *status);
bool get_clients(int server, struct mps_client **clients, unsigned *count);
bool get_devices(int server, struct device_facts **facts, unsigned *count);
bool set(int server, const char *what, unsigned device, uint64_t value);

/* Whether there is a server of this pid and it is ready, as commands about a server need it. One that starts answers
 * nothing ($GPUSIM_MPS_STARTING holds it there); for a pid that is none the answer is that it is not found. */
bool server_ready(int server, int pid, struct mps_status *status);

/* Not while $GPUSIM_MPS_STARTING is set. */
bool is_ready(const struct mps_status *status);

/* Commands about limits; `words`: what follows the name. */
void get_default_percentage(int server, const char *words);
void set_default_percentage(int server, const char *words);
void get_percentage(int server, const char *words);
void set_percentage(int server, const char *words);
void get_default_memory(int server, const char *words);
void set_default_memory(int server, const char *words);
void get_memory(int server, const char *words);
void set_memory(int server, const char *words);
void get_default_priority(int server, const char *words);
void set_default_priority(int server, const char *words);
