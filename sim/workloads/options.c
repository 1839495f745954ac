/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "options.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int option_next(int argc, char **argv, const struct option *options, const char *usage)
{
	int letter = getopt_long(argc, argv, "", options, NULL);

	if (letter == '?' || letter == 'h') {
		fputs(usage, letter == 'h' ? stdout : stderr);
		exit(letter == 'h' ? 0 : 2);
	}
	return letter;
}

uint64_t option_count(const char *option, const char *text, uint64_t least, uint64_t most)
{
	char *end;
	unsigned long long value;

	errno = 0;
	value = strtoull(text, &end, 10);
	if (errno || !isdigit((unsigned char)*text) || *end || value < least || value > most) {
		fprintf(stderr, "%s wants a whole number from %lu to %lu, not \"%s\"\n", option, least, most, text);
		exit(2);
	}
	return value;
}

double option_number(const char *option, const char *text, double least, double most)
{
	char *end;
	double value = strtod(text, &end);

	if (end == text || *end || !(value >= least && value <= most)) {
		fprintf(stderr, "%s wants a number from %g to %g, not \"%s\"\n", option, least, most, text);
		exit(2);
	}
	return value;
}

uint64_t option_bytes(const char *option, const char *text)
{
	static const char *const UNITS[] = {"", "KiB", "MiB", "GiB"};
	char *end;
	unsigned long long value = strtoull(text, &end, 10);

	for (unsigned power = 0; isdigit((unsigned char)*text) && power < 4; power++)
		if (!strcmp(end, UNITS[power]) && value <= UINT64_MAX >> (10 * power))
			return value << (10 * power);
	fprintf(stderr, "%s wants bytes, such as 1048576 or 10GiB, not \"%s\"\n", option, text);
	exit(2);
}
