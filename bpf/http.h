/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* HTTP/1 request latencies of the containers that are watched. enforce/signals/http_probe.py mirrors it. */
#pragma once

#ifndef __bpf__
#include <linux/types.h>
#endif

#define HTTP_WATCHES 64 /* containers at once */
#define HTTP_PATH 64
#define HTTP_CHILDREN 1024 /* processes that are added at a fork, per watch */
#define HTTP_SLOTS 1024 /* connections that are followed at once, per watch */
#define HTTP_CLASSES 6 /* of statuses: index 0 is for those that were not seen */

/* Index of the map `http_tallies`: first what was seen, then why a request is missing among the latencies. */
enum http_tally {
	HTTP_ANSWERED, /* requests whose latency was recorded */
	HTTP_ELSEWHERE, /* requests for other paths */
	HTTP_OTHER_STATUS, /* requests whose answer has a status that the objective does not count, or an unseen one */
	HTTP_FOREIGN, /* connections that do not speak HTTP/1 */
	HTTP_UNANSWERED, /* the connection ended first */
	HTTP_UNSEEN, /* answers to requests whose beginning was not seen */
	HTTP_UNREADABLE, /* what was sent could not be read, or did not pass through user memory */
	HTTP_UNFRAMED, /* what was sent made no sense as HTTP/1 */
	HTTP_LONG, /* one call moved more than can be looked through */
	HTTP_DEEP, /* more requests at once on one connection than HTTP_DEPTH */
	HTTP_NO_CONNECTION, /* the map `http_connections` was full */
	HTTP_EVICTED, /* the connection gave its slot to a later one of the same port */
	HTTP_NO_PROCESS, /* the watch had HTTP_CHILDREN already */
	HTTP_TALLIES,
};

/* What to look for in one container. `epoch` grows when the place goes to another one; 0: to none. */
struct http_watch {
	__u32 epoch;
	__u16 port; /* local, in host order */
	__u16 path_length;
	char path[HTTP_PATH]; /* how a request's target has to begin */
	__u32 classes; /* bit n: a status of class n is recorded among the latencies */
	__u32 slots; /* bit n: the container works on the device whose gate this is */
};

/* What one watch saw; only of requests for its path, tallies aside. */
struct http_counts {
	__u64 tallies[HTTP_TALLIES];
	__u64 classes[HTTP_CLASSES]; /* answers by the first digit of their status */
	__u64 receive_ns; /* sum, first byte of the request -> its last one, read */
	__u64 head_ns; /* sum, end of the request's head -> last byte of its answer */
	__u64 first_byte_ns; /* sum, end of the request -> first byte of its answer */
	__u64 service_ns; /* sum, end of the request -> last byte of its answer */
	__u64 cursor; /* where the search for a slot goes on */
	__s64 children; /* processes that the kernel added */
};

/* A process of a watched container; children inherit it. */
struct http_follower {
	__u32 watch;
	__u32 epoch;
	__u32 is_child; /* the kernel added it */
};
