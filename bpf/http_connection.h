/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Requests and answers of one connection, as the server reads and writes them. Answers come in the order of the
 * requests, so a queue of times is all that is kept. One side adds to it, the other takes from it: reads of a
 * connection follow each other and so do writes, but a read and a write may be looked at at once.
 *
 * Where the bytes make no sense any more (a call that could not be read, a server that breaks its own framing) the
 * connection is `astray`: an answer then ends with the last write before the next request is read.
 *
 * A latency begins where the request ends, as how long a client takes to send it says nothing about the server: with
 * its head, or with its body if that was read later and the answer had not begun by then.
 */
#pragma once
#include "http_parser.h"

#define HTTP_DEPTH 32 /* requests that wait for their answers */

enum http_side {
	HTTP_READ,
	HTTP_WRITE,
};

struct http_connection {
	struct http_parser request;
	struct http_parser answer;
	__u64 request_ns; /* when the first byte of the request that is being read was there */
	__u64 last_write_ns;
	__u64 answer_ns; /* when the first byte of the answer was written */
	__u64 begun[HTTP_DEPTH]; /* ns, end of the request; its three lowest bits are the request's flags */
	__u32 receive_us[HTTP_DEPTH]; /* its first byte -> its end */
	__u32 body_us[HTTP_DEPTH]; /* end of its head -> its end */
	__u32 pushed;
	__u32 popped;
	__u32 watch;
	__u32 epoch;
	__u32 slot; /* of its watch */
	__u32 whole; /* requests that were read to their ends, as of the last read */
	__u64 reported; /* known requests that gates count, and above them these gates: one word, so that both change at once */
	__u64 sock;
	__u8 is_fresh; /* seen from its beginning on */
	__u8 spoke; /* a request was answered */
	__u8 answering; /* the answer that is being written has a request */
	__u8 wrote; /* since the last read */
	__u8 astray;
	__u8 closed; /* speaks something else from here on */
	__u8 arrived; /* bytes of a request that is not read to its end */
	__u8 is_shut; /* the server sends no more */
	__u8 _pad[4];
};

/* A request that is over. `tally`: how it ended, an enum http_tally; HTTP_TALLIES: none is over. */
struct http_outcome {
	__u64 begun_ns;
	__u64 ended_ns;
	__u64 answer_ns;
	__u32 receive_us;
	__u32 body_us;
	__u32 status_class; /* 0: not seen */
	__u32 tally;
	__u32 count;
};

#define FLAG_BITS 7ull
#define FLAG_SHIFT 3 /* HTTP_HEAD, HTTP_CONNECT and HTTP_OTHER_PATH are neighbours */

static __always_inline __u32 http_waiting(const struct http_connection *connection)
{
	return connection->pushed - connection->popped;
}

static __always_inline void http_tell(struct http_outcome *outcome, __u32 tally, __u32 count)
{
	outcome->tally = tally;
	outcome->count = count;
}

static __always_inline void http_start(struct http_connection *connection, int is_fresh)
{
	connection->is_fresh = is_fresh;
	connection->answer.is_answer = 1;
}

static __always_inline __u8 http_first_flags(const struct http_connection *connection)
{
	return (connection->begun[connection->popped % HTTP_DEPTH] & FLAG_BITS) << FLAG_SHIFT;
}

/* The oldest request is answered. */
static __always_inline void http_pop(struct http_connection *connection, __u64 ended_ns, struct http_outcome *outcome)
{
	__u32 index = connection->popped % HTTP_DEPTH, status_class = connection->answer.status / 100;

	outcome->begun_ns = connection->begun[index] & ~FLAG_BITS;
	outcome->ended_ns = ended_ns;
	outcome->answer_ns = connection->answer_ns > outcome->begun_ns ? connection->answer_ns : outcome->begun_ns;
	outcome->receive_us = connection->receive_us[index];
	outcome->body_us = connection->body_us[index];
	outcome->status_class = status_class < HTTP_CLASSES ? status_class : 0;
	connection->answer.status = 0; /* of an answer that is not looked at nothing may be assumed */
	http_tell(outcome, http_first_flags(connection) & HTTP_OTHER_PATH ? HTTP_ELSEWHERE : HTTP_ANSWERED, 1);
	connection->popped++;
	connection->spoke = 1;
}

static __always_inline void http_go_astray(struct http_connection *connection, __u32 tally,
					   struct http_outcome *outcome)
{
	connection->astray = 1;
	http_tell(outcome, tally, 1);
}

/* Bytes that are not HTTP/1: from the first on, or only since something was missed. */
static __always_inline void http_misunderstand(struct http_connection *connection, struct http_outcome *outcome)
{
	if (connection->is_fresh && !connection->spoke) {
		connection->closed = 1;
		connection->popped = connection->pushed;
		http_tell(outcome, HTTP_FOREIGN, 1);
	} else {
		http_go_astray(connection, connection->spoke ? HTTP_UNFRAMED : HTTP_UNSEEN, outcome);
	}
}

static __always_inline __u32 http_microseconds(__u64 from_ns, __u64 to_ns)
{
	__u64 passed_us = to_ns > from_ns ? (to_ns - from_ns) / 1000 : 0;

	return passed_us < 0xffffffff ? passed_us : 0xffffffff;
}

static __always_inline void http_push(struct http_connection *connection, __u64 now, struct http_outcome *outcome)
{
	__u8 flags = connection->request.flags >> FLAG_SHIFT;
	__u32 index = connection->pushed % HTTP_DEPTH;

	if (http_waiting(connection) >= HTTP_DEPTH) {
		http_go_astray(connection, HTTP_DEEP, outcome);
		return;
	}
	connection->begun[index] = (now & ~FLAG_BITS) | (flags & FLAG_BITS);
	connection->receive_us[index] = http_microseconds(connection->request_ns, now);
	connection->body_us[index] = 0;
	connection->pushed++;
}

/* The body of the newest request is complete too. */
static __always_inline void http_read_body(struct http_connection *connection, __u64 now)
{
	__u32 index = (connection->pushed - 1) % HTTP_DEPTH;
	__u64 begun = connection->begun[index];

	if (!http_waiting(connection) || (http_waiting(connection) == 1 && connection->answer.phase != HTTP_IDLE))
		return;
	connection->body_us[index] = http_microseconds(begun & ~FLAG_BITS, now);
	connection->receive_us[index] = http_microseconds(connection->request_ns, now);
	connection->begun[index] = (now & ~FLAG_BITS) | (begun & FLAG_BITS);
}

/* Requests that are complete and not answered: for each the server has something to do. */
static __always_inline __u32 http_in_service(const struct http_connection *connection)
{
	__u32 waiting = http_waiting(connection);

	return waiting && http_has_body_left(&connection->request) ? waiting - 1 : waiting;
}

/* Requests that were read to their ends, ever. Not in_service + popped: the other side may pop between the two. */
static __always_inline __u32 http_whole(const struct http_connection *connection)
{
	return connection->pushed - (http_waiting(connection) && http_has_body_left(&connection->request));
}

static __always_inline void http_read_event(struct http_connection *connection, __u32 event, __u64 now,
					    struct http_outcome *outcome)
{
	if (event & HTTP_BROKE) {
		http_misunderstand(connection, outcome);
		return;
	}
	if (event & HTTP_BEGAN)
		connection->request_ns = now;
	if (event & HTTP_HEADED) {
		http_push(connection, now, outcome);
		http_headed(&connection->request);
	} else if (event & HTTP_DONE) {
		http_read_body(connection, now);
	}
}

/* The header of an answer is complete: whose it is, and with that whether it has a body. */
static __always_inline __u32 http_answer_headed(struct http_connection *connection)
{
	struct http_parser *answer = &connection->answer;

	connection->answering = answer->status / 100 != 1 || answer->status == 101;
	if (connection->answering && !http_waiting(connection))
		connection->answering = 0;
	else
		answer->flags |= http_first_flags(connection) & (HTTP_HEAD | HTTP_CONNECT);
	return http_headed(answer);
}

static __always_inline void http_answer_done(struct http_connection *connection, __u64 now,
					     struct http_outcome *outcome)
{
	struct http_parser *answer = &connection->answer;

	if (answer->status == 101 || (answer->flags & HTTP_CONNECT && answer->status / 100 == 2))
		connection->closed = 1;
	if (connection->answering)
		http_pop(connection, now, outcome);
	else if (answer->status / 100 != 1 || answer->status == 101)
		http_tell(outcome, HTTP_UNSEEN, 1);
	connection->answering = 0;
}

static __always_inline void http_write_event(struct http_connection *connection, __u32 event, __u64 now,
					     struct http_outcome *outcome)
{
	if (event & HTTP_BROKE) {
		http_misunderstand(connection, outcome);
		return;
	}
	if (event & HTTP_BEGAN)
		connection->answer_ns = now;
	if (event & HTTP_HEADED)
		event |= http_answer_headed(connection);
	if (event & HTTP_DONE)
		http_answer_done(connection, now, outcome);
}

static __always_inline void http_event(struct http_connection *connection, enum http_side side, __u32 event, __u64 now,
				       struct http_outcome *outcome)
{
	if (side == HTTP_READ)
		http_read_event(connection, event, now, outcome);
	else
		http_write_event(connection, event, now, outcome);
}

/* No more of the answer will come: it ended with the last write, if nothing else said where. */
static __always_inline void http_conclude(struct http_connection *connection, struct http_outcome *outcome)
{
	__u32 waiting = http_waiting(connection);
	int open = connection->answering && connection->answer.phase == HTTP_UNTIL_CLOSE;
	__u64 begun = connection->begun[connection->popped % HTTP_DEPTH] & ~FLAG_BITS;

	if (waiting && (open || (connection->astray && waiting == 1)) && connection->last_write_ns > begun)
		http_pop(connection, connection->last_write_ns, outcome);
	connection->answering = 0;
}

/* Begins anew at what may be the first byte of a request. */
static __always_inline void http_find_back(struct http_connection *connection, struct http_outcome *outcome)
{
	http_conclude(connection, outcome);
	if (outcome->tally == HTTP_TALLIES && http_waiting(connection))
		http_tell(outcome, HTTP_UNANSWERED, http_waiting(connection));
	connection->popped = connection->pushed;
	connection->request.phase = HTTP_IDLE;
	connection->answer.phase = HTTP_IDLE;
	connection->answer.status = 0;
	connection->astray = 0;
}

/* Before the bytes of a call are looked at: 0 if they need not be. */
static __always_inline int http_enter(struct http_connection *connection, enum http_side side, __u64 now,
				      struct http_outcome *outcome)
{
	__u8 wrote = connection->wrote;

	if (connection->closed)
		return 0;
	connection->wrote = side == HTTP_WRITE;
	if (side == HTTP_WRITE)
		connection->last_write_ns = now;
	else if (connection->astray && wrote)
		http_find_back(connection, outcome);
	return !connection->astray;
}

/* The socket is gone: how many requests had no answer. */
static __always_inline void http_abandon(struct http_connection *connection, struct http_outcome *outcome)
{
	if (http_waiting(connection))
		http_tell(outcome, HTTP_UNANSWERED, http_waiting(connection));
	connection->popped = connection->pushed;
}
