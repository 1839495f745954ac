// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * The kernel's view of an HTTP connection, fuzzed in user space: the inputs are calls, each ended by a byte 0xff, reads
 * that begin with "<" and writes that begin with ">". Beside what the sanitizers find, a call's bytes have to mean the
 * same in one piece and in several, and no more requests may wait than there is room for. Without libFuzzer its
 * arguments are files with an input each.
 */
#include <stdint.h>
#include <stdio.h>

#include "http_parser.c"

#define MOST_BYTES 4096
#define MOST_OUTCOMES (MOST_BYTES + 2)

static const struct http_watch watch = {.epoch = 1, .port = 80, .path_length = 4, .path = "/v1/", .classes = 0x3f};

struct side_by_side {
	struct http_connection whole, cut;
	struct http_outcome whole_outcomes[MOST_OUTCOMES], cut_outcomes[MOST_OUTCOMES];
};

static void require(int holds)
{
	if (!holds)
		__builtin_trap();
}

static void check(const struct http_connection *connection, const struct http_outcome *outcomes, int count)
{
	require(http_waiting(connection) <= HTTP_DEPTH);
	for (int index = 0; index < count; index++) {
		require(outcomes[index].tally < HTTP_TALLIES && outcomes[index].count > 0);
		require(outcomes[index].status_class < HTTP_CLASSES);
		if (outcomes[index].tally == HTTP_ANSWERED)
			require(outcomes[index].begun_ns <= outcomes[index].ended_ns);
	}
}

/* In pieces of one to seven bytes, which their number chooses. */
static int feed_cut(struct http_connection *connection, int side, const char *bytes, size_t left, __u64 now,
		    struct http_outcome *outcomes)
{
	int count = 0;

	for (size_t piece = 1 + left % 7; left; piece = piece % 7 + 1) {
		size_t most = piece < left ? piece : left;

		count += feed(connection, side, &watch, bytes, most, now, outcomes + count);
		bytes += most;
		left -= most;
	}
	return count;
}

static int is_same(const struct http_outcome *one, const struct http_outcome *other)
{
	return one->begun_ns == other->begun_ns && one->ended_ns == other->ended_ns &&
	       one->answer_ns == other->answer_ns && one->status_class == other->status_class &&
	       one->tally == other->tally && one->count == other->count;
}

static void call(struct side_by_side *both, const char *bytes, size_t size, __u64 now)
{
	int side = *bytes == '>' ? HTTP_WRITE : HTTP_READ, count, pieces;
	size_t skipped = *bytes == '>' || *bytes == '<';

	if (size == skipped)
		return;
	count = feed(&both->whole, side, &watch, bytes + skipped, size - skipped, now, both->whole_outcomes);
	pieces = feed_cut(&both->cut, side, bytes + skipped, size - skipped, now, both->cut_outcomes);
	check(&both->whole, both->whole_outcomes, count);
	require(count == pieces);
	for (int index = 0; index < count; index++)
		require(is_same(&both->whole_outcomes[index], &both->cut_outcomes[index]));
	require(!memcmp(&both->whole, &both->cut, sizeof(both->whole)));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
	static struct side_by_side both;
	const char *at = (const char *)data, *last = at + (size < MOST_BYTES ? size : MOST_BYTES);

	start(&both.whole, size & 1);
	start(&both.cut, size & 1);
	for (__u64 now = 8000; at < last; now += 8000) {
		const char *next = memchr(at, 0xff, last - at);

		if (!next)
			next = last;
		if (next > at)
			call(&both, at, next - at, now);
		at = next + 1;
	}
	check(&both.whole, both.whole_outcomes, end(&both.whole, both.whole_outcomes));
	return 0;
}

#ifndef FUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION /* as libFuzzer calls it, which has a main of its own */
int main(int count, char **paths)
{
	static uint8_t bytes[MOST_BYTES];

	for (int index = 1; index < count; index++) {
		FILE *file = fopen(paths[index], "rb");

		if (!file) {
			perror(paths[index]);
			return 1;
		}
		LLVMFuzzerTestOneInput(bytes, fread(bytes, 1, sizeof(bytes), file));
		fclose(file);
	}
	printf("%d\n", count - 1);
	return 0;
}
#endif
