/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Numbers on the command line. A bad one ends the program with status 2 and says which option wants what. */
#ifndef GPUWARDEN_WORKLOADS_OPTIONS_H
#define GPUWARDEN_WORKLOADS_OPTIONS_H

#include <stdint.h>

uint64_t option_count(const char *option, const char *text, uint64_t least, uint64_t most);

double option_number(const char *option, const char *text, double least, double most);

/* Bytes, plain or with one of KiB, MiB, GiB. */
uint64_t option_bytes(const char *option, const char *text);

#endif
