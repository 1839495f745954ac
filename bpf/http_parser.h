/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Where HTTP/1 messages begin and end in one direction of a connection. Nothing of the kernel is in here: the tests
 * compile it for user space. Fed with up to eight bytes at a time, cut anywhere; keeps no byte.
 */
#pragma once
#include "http.h"

#ifndef __always_inline
#define __always_inline inline __attribute__((always_inline))
#endif

enum http_phase {
	HTTP_IDLE, /* before the first byte of a message */
	HTTP_METHOD,
	HTTP_TARGET,
	HTTP_VERSION,
	HTTP_STATUS,
	HTTP_NAME, /* of a header, from the beginning of its line */
	HTTP_SKIP, /* to the end of the line */
	HTTP_LENGTH, /* value of Content-Length */
	HTTP_CODING, /* value of Transfer-Encoding */
	HTTP_BODY,
	HTTP_CHUNK_SIZE,
	HTTP_CHUNK_EXTENSION,
	HTTP_CHUNK,
	HTTP_CHUNK_END,
	HTTP_TRAILER, /* from the beginning of a line */
	HTTP_TRAILER_SKIP,
	HTTP_UNTIL_CLOSE, /* a body without a length */
	HTTP_OTHER, /* this is no HTTP/1 */
};

enum http_flag {
	HTTP_HAS_LENGTH = 1,
	HTTP_HAS_CODING = 2,
	HTTP_CHUNKED = 4,
	HTTP_HEAD = 8, /* the request's method: its answer has no body */
	HTTP_CONNECT = 16,
	HTTP_OTHER_PATH = 32,
	HTTP_HAS_DIGIT = 64,
};

enum http_event {
	HTTP_BEGAN = 1, /* the first byte of a message */
	HTTP_HEADED = 2, /* its header is complete */
	HTTP_DONE = 4, /* its body too */
	HTTP_BROKE = 8, /* this is no HTTP/1 */
};

struct http_parser {
	__u64 left; /* of a body or a chunk; before that the number that is being read */
	__u16 status;
	__u8 phase;
	__u8 matched; /* how much of a known word */
	__u8 flags;
	__u8 is_answer;
	__u8 name; /* of the header that is being compared: enum http_flag */
	__u8 _pad;
};

#define HTTP_MOST_LEFT (1ull << 56)
#define HTTP_LONGEST_METHOD 24
#define HTTP_NO_MATCH 255
#define WORD(a, b, c, d, e, f, g, h)                                                                                   \
	((__u64)(a) << 56 | (__u64)(b) << 48 | (__u64)(c) << 40 | (__u64)(d) << 32 | (__u64)(e) << 24 |                \
	 (__u64)(f) << 16 | (__u64)(g) << 8 | (__u64)(h))

/* Letter `index` of words of up to 24 letters, which lie in three numbers; 0 past the end. */
static __always_inline __u8 letter_of(__u64 first, __u64 second, __u64 third, __u32 index)
{
	__u64 word = index < 8 ? first : index < 16 ? second : index < 24 ? third : 0;

	return word >> (56 - 8 * (index & 7));
}

static __always_inline __u8 length_letter(__u32 index)
{
	return letter_of(WORD('c', 'o', 'n', 't', 'e', 'n', 't', '-'), WORD('l', 'e', 'n', 'g', 't', 'h', ':', 0), 0,
			 index);
}

static __always_inline __u8 coding_letter(__u32 index)
{
	return letter_of(WORD('t', 'r', 'a', 'n', 's', 'f', 'e', 'r'), WORD('-', 'e', 'n', 'c', 'o', 'd', 'i', 'n'),
			 WORD('g', ':', 0, 0, 0, 0, 0, 0), index);
}

static __always_inline __u8 chunked_letter(__u32 index)
{
	return letter_of(WORD('c', 'h', 'u', 'n', 'k', 'e', 'd', 0), 0, 0, index);
}

static __always_inline __u8 version_letter(__u32 index)
{
	return letter_of(WORD('H', 'T', 'T', 'P', '/', '1', '.', 0), 0, 0, index);
}

static __always_inline __u8 lower(__u8 byte)
{
	return byte >= 'A' && byte <= 'Z' ? byte + 32 : byte;
}

static __always_inline int is_digit(__u8 byte)
{
	return byte >= '0' && byte <= '9';
}

static __always_inline int is_method(__u8 byte)
{
	return (byte >= 'A' && byte <= 'Z') || byte == '-' || byte == '_';
}

static __always_inline __u32 http_turn(struct http_parser *parser, __u8 phase)
{
	parser->phase = phase;
	parser->matched = 0;
	return 0;
}

static __always_inline __u32 http_break(struct http_parser *parser)
{
	parser->phase = HTTP_OTHER;
	return HTTP_BROKE;
}

static __always_inline __u32 http_done(struct http_parser *parser)
{
	parser->phase = HTTP_IDLE;
	return HTTP_DONE;
}

static __always_inline __u32 http_begin(struct http_parser *parser, __u8 byte)
{
	if (byte == '\r' || byte == '\n') /* some clients end a body with a line that its length does not count */
		return parser->is_answer ? http_break(parser) : 0;
	parser->flags = 0;
	parser->status = 0;
	parser->left = byte;
	parser->matched = 1;
	parser->phase = parser->is_answer ? HTTP_VERSION : HTTP_METHOD;
	if (parser->is_answer ? byte != 'H' : !(byte >= 'A' && byte <= 'Z'))
		return http_break(parser);
	return HTTP_BEGAN;
}

static __always_inline __u32 http_method(struct http_parser *parser, __u8 byte)
{
	if (byte == ' ') {
		if (parser->left == WORD(0, 0, 0, 0, 'H', 'E', 'A', 'D'))
			parser->flags |= HTTP_HEAD;
		if (parser->left == WORD(0, 'C', 'O', 'N', 'N', 'E', 'C', 'T'))
			parser->flags |= HTTP_CONNECT;
		return http_turn(parser, HTTP_TARGET);
	}
	if (!is_method(byte) || parser->matched >= HTTP_LONGEST_METHOD)
		return http_break(parser);
	parser->left = parser->left << 8 | byte;
	parser->matched++;
	return 0;
}

static __always_inline __u32 http_target(struct http_parser *parser, const struct http_watch *watch, __u8 byte)
{
	__u32 index = parser->matched;

	if (byte <= ' ' && (byte != ' ' || !index))
		return http_break(parser); /* without a version it is HTTP/0.9 at best */
	if (byte == ' ') {
		if (index < watch->path_length)
			parser->flags |= HTTP_OTHER_PATH;
		return http_turn(parser, HTTP_VERSION);
	}
	if (index < HTTP_PATH && index < watch->path_length && byte != (__u8)watch->path[index])
		parser->flags |= HTTP_OTHER_PATH;
	if (index <= HTTP_PATH)
		parser->matched++;
	return 0;
}

/* HTTP/1.x, then what ends a request's line, or the blank before an answer's status. */
static __always_inline __u32 http_version(struct http_parser *parser, __u8 byte)
{
	__u32 index = parser->matched++;

	parser->left = 0;
	if (index < 7)
		return byte == version_letter(index) ? 0 : http_break(parser);
	if (index == 7)
		return is_digit(byte) ? 0 : http_break(parser);
	if (parser->is_answer)
		return byte == ' ' ? http_turn(parser, HTTP_STATUS) : http_break(parser);
	if (byte == '\n')
		return http_turn(parser, HTTP_NAME);
	return byte == '\r' && index == 8 ? 0 : http_break(parser);
}

static __always_inline __u32 http_status(struct http_parser *parser, __u8 byte)
{
	__u32 index = parser->matched++;

	if (index < 3) {
		parser->status = parser->status * 10 + (byte - '0');
		return is_digit(byte) ? 0 : http_break(parser);
	}
	if (byte != ' ' && byte != '\r' && byte != '\n')
		return http_break(parser);
	return http_turn(parser, byte == '\n' ? HTTP_NAME : HTTP_SKIP);
}

static __always_inline int http_has_no_body(const struct http_parser *parser)
{
	if (!parser->is_answer)
		return 0;
	if (parser->status / 100 == 1 || parser->status == 204 || parser->status == 304)
		return 1;
	return parser->flags & HTTP_HEAD || (parser->flags & HTTP_CONNECT && parser->status / 100 == 2);
}

/* Its head is complete, its body is not. */
static __always_inline int http_has_body_left(const struct http_parser *parser)
{
	return parser->phase >= HTTP_BODY && parser->phase <= HTTP_UNTIL_CLOSE;
}

/* How the body ends: RFC 9112, 6.3. Of an answer the caller has set HTTP_HEAD and HTTP_CONNECT from its request. */
static __always_inline __u32 http_headed(struct http_parser *parser)
{
	if (http_has_no_body(parser))
		return http_done(parser);
	if (parser->flags & HTTP_CHUNKED) {
		parser->left = 0;
		return http_turn(parser, HTTP_CHUNK_SIZE);
	}
	if (parser->flags & HTTP_HAS_CODING)
		return http_turn(parser, HTTP_UNTIL_CLOSE);
	if (parser->flags & HTTP_HAS_LENGTH && parser->left)
		return http_turn(parser, HTTP_BODY);
	if (parser->flags & HTTP_HAS_LENGTH || !parser->is_answer)
		return http_done(parser);
	return http_turn(parser, HTTP_UNTIL_CLOSE);
}

/* By its first letter only one name of the two can be meant. */
static __always_inline __u32 http_name(struct http_parser *parser, __u8 byte)
{
	__u32 index = parser->matched++;
	__u8 low = lower(byte);
	int fits;

	if (byte == '\n')
		return index ? http_turn(parser, HTTP_NAME) : HTTP_HEADED;
	if (!index && byte == '\r')
		return http_turn(parser, HTTP_NAME);
	if (!index)
		parser->name = low == 't' ? HTTP_HAS_CODING : HTTP_HAS_LENGTH;
	fits = low == (parser->name == HTTP_HAS_CODING ? coding_letter(index) : length_letter(index));
	if (!fits)
		return http_turn(parser, HTTP_SKIP);
	if (byte != ':')
		return 0;
	if (parser->name == HTTP_HAS_CODING) {
		parser->flags |= HTTP_HAS_CODING;
		return http_turn(parser, HTTP_CODING);
	}
	parser->left = 0;
	return http_turn(parser, HTTP_LENGTH);
}

static __always_inline __u32 http_length(struct http_parser *parser, __u8 byte)
{
	if (byte == '\n')
		return http_turn(parser, HTTP_NAME);
	if (is_digit(byte)) {
		parser->flags |= HTTP_HAS_LENGTH;
		parser->left = parser->left * 10 + (byte - '0');
		return parser->left < HTTP_MOST_LEFT ? 0 : http_break(parser);
	}
	if (byte == ' ' || byte == '\t')
		return 0;
	return http_turn(parser, HTTP_SKIP);
}

/* Chunked counts as the last of several codings only. */
static __always_inline __u32 http_coding(struct http_parser *parser, __u8 byte)
{
	__u32 index = parser->matched;

	if (byte == '\n')
		return http_turn(parser, HTTP_NAME);
	if (byte == ' ' || byte == '\t' || byte == '\r')
		return 0;
	parser->flags &= ~HTTP_CHUNKED;
	if (byte == ',') {
		parser->matched = 0;
	} else if (index < 7 && lower(byte) == chunked_letter(index)) {
		parser->matched = index + 1;
		if (index == 6)
			parser->flags |= HTTP_CHUNKED;
	} else {
		parser->matched = HTTP_NO_MATCH;
	}
	return 0;
}

static __always_inline __u32 http_chunk_begins(struct http_parser *parser)
{
	return http_turn(parser, parser->left ? HTTP_CHUNK : HTTP_TRAILER);
}

static __always_inline __u32 http_chunk_size(struct http_parser *parser, __u8 byte)
{
	__u8 low = lower(byte);

	if (is_digit(byte) || (low >= 'a' && low <= 'f')) {
		parser->matched = 1;
		parser->left = parser->left << 4 | (is_digit(byte) ? byte - '0' : low - 'a' + 10);
		return parser->left < HTTP_MOST_LEFT ? 0 : http_break(parser);
	}
	if (!parser->matched)
		return http_break(parser);
	if (byte == '\n')
		return http_chunk_begins(parser);
	if (byte != '\r' && byte != ';' && byte != ' ' && byte != '\t')
		return http_break(parser);
	return http_turn(parser, HTTP_CHUNK_EXTENSION);
}

static __always_inline __u32 http_chunk_end(struct http_parser *parser, __u8 byte)
{
	if (byte == '\n')
		return http_turn(parser, HTTP_CHUNK_SIZE);
	return byte == '\r' && !parser->matched++ ? 0 : http_break(parser);
}

static __always_inline __u32 http_trailer(struct http_parser *parser, __u8 byte)
{
	if (byte == '\n')
		return http_done(parser);
	return byte == '\r' ? 0 : http_turn(parser, HTTP_TRAILER_SKIP);
}

/* The next byte. What happened: enum http_event. */
static __always_inline __u32 http_byte(struct http_parser *parser, const struct http_watch *watch, __u8 byte)
{
	switch (parser->phase) {
	case HTTP_IDLE:
		return http_begin(parser, byte);
	case HTTP_METHOD:
		return http_method(parser, byte);
	case HTTP_TARGET:
		return http_target(parser, watch, byte);
	case HTTP_VERSION:
		return http_version(parser, byte);
	case HTTP_STATUS:
		return http_status(parser, byte);
	case HTTP_NAME:
		return http_name(parser, byte);
	case HTTP_LENGTH:
		return http_length(parser, byte);
	case HTTP_CODING:
		return http_coding(parser, byte);
	case HTTP_CHUNK_SIZE:
		return http_chunk_size(parser, byte);
	case HTTP_CHUNK_END:
		return http_chunk_end(parser, byte);
	case HTTP_TRAILER:
		return http_trailer(parser, byte);
	default:
		return http_break(parser);
	}
}

/* A bit in the lowest of the eight bytes that is `byte`; what may be set above it means nothing. */
static __always_inline __u64 bytes_like(__u64 bytes, __u8 byte)
{
	__u64 differs = bytes ^ (0x0101010101010101ull * byte);

	return (differs - 0x0101010101010101ull) & ~differs & 0x8080808080808080ull;
}

/* How many bytes there are up to the lowest bit that is set in such a mask, that byte included. */
static __always_inline __u32 bytes_through(__u64 mask)
{
	return ((((mask & -mask) - 1) & 0x0101010101010101ull) * 0x0101010101010101ull) >> 56;
}

static __always_inline int http_is_skipping(const struct http_parser *parser)
{
	return parser->phase == HTTP_SKIP || parser->phase == HTTP_CHUNK_EXTENSION ||
	       parser->phase == HTTP_TRAILER_SKIP;
}

/* Eight at a time to the end of the line, for most of a header is that. How many bytes were taken. */
static __always_inline __u32 http_skip(struct http_parser *parser, __u64 bytes, __u32 count)
{
	__u64 ends = bytes_like(bytes, '\n');
	__u32 taken;

	if (!ends)
		return count;
	taken = bytes_through(ends);
	if (taken > count)
		return count;
	if (parser->phase == HTTP_CHUNK_EXTENSION)
		http_chunk_begins(parser);
	else
		http_turn(parser, parser->phase == HTTP_SKIP ? HTTP_NAME : HTTP_TRAILER);
	return taken;
}

/*
 * Up to `count` (at most eight) bytes, the first in the lowest place, those above `count` 0: how many were taken. It
 * stops at an event; after HTTP_HEADED the caller calls http_headed(), whose event comes on top.
 */
static __always_inline __u32 http_take(struct http_parser *parser, const struct http_watch *watch, __u64 bytes,
				       __u32 count, __u32 *event)
{
	*event = 0;
	if (http_is_skipping(parser))
		return http_skip(parser, bytes, count);
	for (__u32 taken = 0; taken < 8; taken++) {
		if (taken >= count || http_is_skipping(parser) || parser->phase == HTTP_CHUNK ||
		    parser->phase == HTTP_BODY)
			return taken;
		*event = http_byte(parser, watch, bytes >> (8 * taken));
		if (*event)
			return taken + 1;
	}
	return 8;
}

/* Bytes of a body need not be looked at. How many of `count` were taken; 0: these have to be. */
static __always_inline __u64 http_pass(struct http_parser *parser, __u64 count, __u32 *event)
{
	*event = 0;
	if (parser->phase == HTTP_UNTIL_CLOSE || parser->phase == HTTP_OTHER)
		return count;
	if (parser->phase != HTTP_BODY && parser->phase != HTTP_CHUNK)
		return 0;
	if (count < parser->left) {
		parser->left -= count;
		return count;
	}
	count = parser->left;
	parser->left = 0;
	if (parser->phase == HTTP_BODY)
		*event = http_done(parser);
	else
		http_turn(parser, HTTP_CHUNK_END);
	return count;
}
