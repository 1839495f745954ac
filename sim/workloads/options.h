/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Options on the command line. A bad one ends the program with status 2 and says which option wants what. */
#ifndef GPUWARDEN_WORKLOADS_OPTIONS_H
#define GPUWARDEN_WORKLOADS_OPTIONS_H

#include <getopt.h>
#include <stdint.h>

/* The next one, as getopt_long; -1 after the last. --help and one that is not known end the program, with what it takes. */
int option_next(int argc, char **argv, const struct option *options, const char *usage);

uint64_t option_count(const char *option, const char *text, uint64_t least, uint64_t most);

double option_number(const char *option, const char *text, double least, double most);

/* Bytes, plain or with one of KiB, MiB, GiB. */
uint64_t option_bytes(const char *option, const char *text);

#endif
