/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Asking the server of the simulated GPU: one connection, one question at a time. What NVML and the MPS control program
 * share. Not thread-safe: threads that share a connection lock it.
 */
#pragma once

#include <errno.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "protocol.h"

static inline bool query_send(int fd, const void *bytes, size_t length)
{
	while (length) {
		ssize_t sent = send(fd, bytes, length, MSG_NOSIGNAL);

		if (sent < 0 && errno == EINTR)
			continue;
		if (sent <= 0)
			return false;
		bytes = (const char *)bytes + sent;
		length -= (size_t)sent;
	}
	return true;
}

static inline bool query_receive(int fd, void *bytes, size_t length)
{
	while (length) {
		ssize_t got = recv(fd, bytes, length, 0);

		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return false;
		bytes = (char *)bytes + got;
		length -= (size_t)got;
	}
	return true;
}

/* A connection to the server in $GPUSIM_DIR, or -1 when there is none. */
static inline int query_connect_as(uint32_t kind)
{
	struct hello hello = {.magic = GPUSIM_MAGIC, .version = GPUSIM_VERSION, .kind = kind, .mps_priority = -1};
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	const char *dir = getenv("GPUSIM_DIR");
	int fd, length;

	length = snprintf(name.sun_path, sizeof(name.sun_path), "%s/%s", dir && *dir ? dir : GPUSIM_DEFAULT_DIR,
			  GPUSIM_SOCKET);
	if (length < 0 || (size_t)length >= sizeof(name.sun_path))
		return -1;
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd < 0)
		return -1;
	if (connect(fd, (struct sockaddr *)&name, sizeof(name)) < 0 || !query_send(fd, &hello, sizeof(hello))) {
		close(fd);
		return -1;
	}
	return fd;
}

static inline int query_connect(void)
{
	return query_connect_as(HELLO_QUERY);
}

/*
 * Asks. True when there was an answer: `answer->status` is 0 or the server's errno, and `*items` holds what came with
 * it (the caller frees it; NULL for none). False when the connection is gone.
 */
static inline bool query_ask(int fd, const struct query *query, struct answer *answer, void **items)
{
	size_t length;

	*items = NULL;
	if (!query_send(fd, query, sizeof(*query)) || !query_receive(fd, answer, sizeof(*answer)))
		return false;
	length = (size_t)answer->count * answer->item_bytes;
	if (!length)
		return true;
	*items = malloc(length);
	if (!*items || !query_receive(fd, *items, length)) {
		free(*items);
		*items = NULL;
		return false;
	}
	return true;
}
