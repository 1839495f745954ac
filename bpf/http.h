/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* HTTP/1 request latencies of the containers that are watched. enforce/signals/http_probe.py mirrors it. */
#pragma once

#ifndef __bpf__
#include <linux/types.h>
#endif

#define HTTP_WATCHES 64 /* containers at once */
#define HTTP_PATH 64

/* Index of the map `http_tallies`: first what was seen, then why a request is missing among the latencies. */
enum http_tally {
	HTTP_ANSWERED, /* requests whose latency was recorded */
	HTTP_ELSEWHERE, /* requests for other paths */
	HTTP_FOREIGN, /* connections that do not speak HTTP/1 */
	HTTP_UNANSWERED, /* the connection ended first */
	HTTP_UNSEEN, /* answers to requests whose beginning was not seen */
	HTTP_UNREADABLE, /* what was sent could not be read, or did not pass through user memory */
	HTTP_UNFRAMED, /* what was sent made no sense as HTTP/1 */
	HTTP_LONG, /* one call moved more than can be looked through */
	HTTP_DEEP, /* more requests at once on one connection than HTTP_DEPTH */
	HTTP_NO_CONNECTION, /* the map `http_connections` was full */
	HTTP_NO_PROCESS, /* the map `http_wanted` was full */
	HTTP_TALLIES,
};

/* What to look for in one container. `epoch` grows when the place goes to another one; 0: to nobody. */
struct http_watch {
	__u32 epoch;
	__u16 port; /* local, in host order */
	__u16 path_length;
	char path[HTTP_PATH]; /* how a request's target has to begin */
};

/* A process of a watched container; children inherit it. */
struct http_follower {
	__u32 watch;
	__u32 epoch;
};
