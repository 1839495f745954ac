/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "http.h"

#include <arpa/inet.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "clock.h"

enum {
	MOST_CONNECTIONS = 256,
	MOST_REQUEST_BYTES = 8192,
	BACKLOG = 128,
};

struct connection {
	int fd;
	size_t filled;
	char request[MOST_REQUEST_BYTES + 1];
};

static struct service *served;
static int listener = -1;
static atomic_int connections;

static bool send_all(int fd, const char *bytes, size_t length)
{
	while (length) {
		ssize_t sent = send(fd, bytes, length, MSG_NOSIGNAL);

		if (sent <= 0)
			return false;
		bytes += sent;
		length -= (size_t)sent;
	}
	return true;
}

/* Head and body leave in one write, so that a client (and a probe) sees one answer. */
static bool answer(int fd, const char *status, const char *type, const char *body, size_t body_bytes)
{
	char *message = NULL;
	size_t length = 0;
	FILE *file = open_memstream(&message, &length);
	bool sent;

	if (!file)
		return false;
	fprintf(file, "HTTP/1.1 %s\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", status, type, body_bytes);
	fwrite(body, 1, body_bytes, file);
	fclose(file);
	sent = send_all(fd, message, length);
	free(message);
	return sent;
}

static bool answer_text(int fd, const char *status, const char *text)
{
	return answer(fd, status, "text/plain; charset=utf-8", text, strlen(text));
}

static bool answer_metrics(int fd)
{
	char *body = NULL;
	size_t length = 0;
	FILE *file = open_memstream(&body, &length);
	bool sent;

	if (!file)
		return false;
	service_write_metrics(served, file);
	fclose(file);
	sent = answer(fd, "200 OK", "text/plain; version=0.0.4; charset=utf-8", body, length);
	free(body);
	return sent;
}

/* A client may say when its request was due; what it waited since then counts too. */
static uint64_t arrival_of(const char *request)
{
	static const char header[] = "\r\nX-Due-Ns: ";
	const char *said = strstr(request, header), *end = strstr(request, "\r\n\r\n");
	uint64_t now_ns = clock_now_ns(), due_ns = now_ns;

	if (said && said < end)
		due_ns = strtoull(said + strlen(header), NULL, 10);
	return due_ns < now_ns ? due_ns : now_ns;
}

static bool answer_infer(int fd, const char *request)
{
	char body[64];
	uint64_t latency_ns = service_do(served, arrival_of(request));
	int length = snprintf(body, sizeof(body), "{\"latency_seconds\": %.9f}\n", (double)latency_ns / 1e9);

	return answer(fd, "200 OK", "application/json", body, (size_t)length);
}

static bool is_for(const char *request, const char *path)
{
	size_t length = strlen(path);

	return !strncmp(request + 4, path, length) && strchr(" ?", request[4 + length]);
}

static bool route(int fd, const char *request)
{
	if (strncmp(request, "GET ", 4) != 0)
		return answer_text(fd, "405 Method Not Allowed", "only GET\n");
	if (is_for(request, "/infer"))
		return answer_infer(fd, request);
	if (is_for(request, "/metrics"))
		return answer_metrics(fd);
	if (is_for(request, "/healthz"))
		return answer_text(fd, "200 OK", "ok\n");
	return answer_text(fd, "404 Not Found", "there are /infer, /metrics and /healthz\n");
}

/* Bytes of the first whole request in the buffer (GET has no body), reading more as needed; 0: there is none. */
static size_t receive(struct connection *connection)
{
	for (;;) {
		char *end;
		ssize_t got;

		connection->request[connection->filled] = '\0';
		end = strstr(connection->request, "\r\n\r\n");
		if (end)
			return (size_t)(end + 4 - connection->request);
		if (connection->filled == MOST_REQUEST_BYTES)
			return 0;
		got = recv(connection->fd, connection->request + connection->filled,
			   MOST_REQUEST_BYTES - connection->filled, 0);
		if (got <= 0)
			return 0;
		connection->filled += (size_t)got;
	}
}

static void *converse(void *argument)
{
	struct connection *connection = argument;
	size_t length;

	cuda_check(cuCtxSetCurrent(served->gpu.context), "cuCtxSetCurrent");
	while ((length = receive(connection)) > 0) {
		bool last = strstr(connection->request, "Connection: close") != NULL;

		if (!route(connection->fd, connection->request) || last)
			break;
		connection->filled -= length;
		memmove(connection->request, connection->request + length, connection->filled);
	}
	close(connection->fd);
	free(connection);
	atomic_fetch_sub(&connections, 1);
	return NULL;
}

static void start_conversation(int fd)
{
	struct connection *connection = NULL;
	pthread_t thread;

	if (atomic_fetch_add(&connections, 1) < MOST_CONNECTIONS)
		connection = malloc(sizeof(*connection));
	if (connection) {
		connection->fd = fd;
		connection->filled = 0;
		if (pthread_create(&thread, NULL, converse, connection) == 0) {
			pthread_detach(thread);
			return;
		}
		free(connection);
	}
	answer_text(fd, "503 Service Unavailable", "too many connections\n");
	close(fd);
	atomic_fetch_sub(&connections, 1);
}

static void *accept_for_ever(void *unused)
{
	(void)unused;
	for (;;) {
		int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC);

		if (fd >= 0)
			start_conversation(fd);
		else
			usleep(10000); /* out of descriptors, most likely: some will be closed */
	}
	return NULL;
}

unsigned http_serve(struct service *service, const char *address, unsigned port)
{
	struct sockaddr_in name = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
	socklen_t length = sizeof(name);
	pthread_t thread;
	int yes = 1;

	served = service;
	listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	if (inet_pton(AF_INET, address, &name.sin_addr) != 1 ||
	    bind(listener, (struct sockaddr *)&name, sizeof(name)) < 0 || listen(listener, BACKLOG) < 0 ||
	    getsockname(listener, (struct sockaddr *)&name, &length) < 0 ||
	    pthread_create(&thread, NULL, accept_for_ever, NULL) != 0) {
		fprintf(stderr, "cannot serve on %s:%u: %m\n", address, port);
		exit(1);
	}
	pthread_detach(thread);
	return ntohs(name.sin_port);
}
