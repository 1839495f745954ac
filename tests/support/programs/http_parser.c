// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The GPU Warden authors
/* bpf/http_connection.h in user space: the bytes of one call, in pieces of eight, as the kernel's program takes them. */
#include <stddef.h>
#include <string.h>

#include "http_connection.h"

size_t size_of_connection(void)
{
	return sizeof(struct http_connection);
}

void start(struct http_connection *connection, int is_fresh)
{
	memset(connection, 0, sizeof(*connection));
	http_start(connection, is_fresh);
}

static int settle(struct http_outcome *outcomes, int count, const struct http_outcome *outcome)
{
	if (outcome->tally < HTTP_TALLIES)
		outcomes[count++] = *outcome;
	return count;
}

/* What was read or written in one call. How many outcomes there are. */
int feed(struct http_connection *connection, int side, const struct http_watch *watch, const char *bytes, size_t left,
	 __u64 now, struct http_outcome *outcomes)
{
	struct http_parser *parser = side == HTTP_READ ? &connection->request : &connection->answer;
	struct http_outcome outcome = {.tally = HTTP_TALLIES};
	int looks = http_enter(connection, side, now, &outcome), count = settle(outcomes, 0, &outcome);

	while (looks && left && !connection->closed && !connection->astray) {
		__u32 event;
		__u64 taken = http_pass(parser, left, &event), word = 0;

		if (!taken) {
			size_t most = left < 8 ? left : 8;

			memcpy(&word, bytes, most);
			taken = http_take(parser, watch, word, most, &event);
		}
		bytes += taken;
		left -= taken;
		outcome = (struct http_outcome){.tally = HTTP_TALLIES};
		if (event)
			http_event(connection, side, event, now, &outcome);
		count = settle(outcomes, count, &outcome);
	}
	return count;
}

/* The server ends its side, then the socket is gone. */
int end(struct http_connection *connection, struct http_outcome *outcomes)
{
	struct http_outcome outcome = {.tally = HTTP_TALLIES};
	int count;

	http_conclude(connection, &outcome);
	count = settle(outcomes, 0, &outcome);
	outcome = (struct http_outcome){.tally = HTTP_TALLIES};
	http_abandon(connection, &outcome);
	return settle(outcomes, count, &outcome);
}
