/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * MPS: the daemon's settings, its server, and its clients' ends.
 *
 * The server is a process of its own that does nothing: NVML and the daemon name it. It starts with the first client or
 * when it is asked for, and its clients wait until it is ready. A client that dies while its work is queued takes all
 * the others along; one that the daemon terminated, or that leaves by exit(), harms no other.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "server.h"

#define LISTED_BEFORE_NS 12000000ull /* it is ready: in the daemon's list of servers */
#define TERMINATE_NS 35000000ull

enum { /* CUresult */ ILLEGAL_ADDRESS = 700, MPS_CLIENT_TERMINATED = 810 };

/* ---- the server ---- */

/* vfork: no copy of all that this process has mapped is made. */
static pid_t spawn_server(void)
{
	char *words[] = {(char[]){MPS_SERVER_NAME}, NULL};
	pid_t parent = getpid(), child = vfork();
	int nowhere;

	if (child != 0)
		return child;
	nowhere = open("/dev/null", O_RDWR);
	for (int fd = 0; fd < 3; fd++)
		dup2(nowhere, fd);
	prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
	if (getppid() == parent)
		execv("/proc/self/exe", words);
	_exit(1);
}

/* Defaults are for servers that start later: a server has those of its start. */
static void start_server(struct node *node)
{
	struct mps *mps = &node->mps;

	if (mps->started)
		return;
	mps->started = true;
	mps->server = spawn_server();
	mps->ready_ns = clock_ns() + node->config.mps_start_ns;
	mps->percentage = mps->default_percentage;
	memcpy(mps->memory, mps->default_memory, sizeof(mps->memory));
}

static void stop_server(struct node *node)
{
	if (node->mps.server > 0) {
		kill(node->mps.server, SIGKILL);
		waitpid(node->mps.server, NULL, 0);
	}
	node->mps.server = 0;
	node->mps.started = false;
}

uint32_t mps_server_pid(const struct node *node)
{
	return (uint32_t)(node->mps.server > 0 ? node->mps.server : getpid());
}

bool mps_makes_wait(struct node *node, const struct hello *hello)
{
	if (hello->kind != HELLO_CUDA || !hello->mps || !node->mps.running)
		return false;
	start_server(node);
	return clock_ns() < node->mps.ready_ns;
}

void mps_end(struct node *node)
{
	stop_server(node);
}

/* ---- its clients' ends ---- */

static bool is_busy(const struct node *node, const struct client *client)
{
	for (unsigned d = 0; d < device_count(node->model); d++)
		if (client->contexts[d] && context_queued(client->contexts[d]))
			return true;
	return false;
}

/* Its contexts stay, empty, with their memory: the process lives, and every call of it fails. */
static void break_client(struct node *node, struct client *client)
{
	client->broken = true;
	atomic_store(&client->shared->gone, ILLEGAL_ADDRESS);
	memset(client->streams, 0, sizeof(client->streams));
	for (unsigned d = 0; d < device_count(node->model); d++) {
		if (!client->contexts[d])
			continue;
		context_end(client->contexts[d]);
		client->contexts[d] = context_new(node->model, d, client, client->records[d], true, client->percentage,
						  client->priority);
	}
	client->dirty = true;
}

void mps_client_ends(struct node *node, struct client *client)
{
	if (!client->mps || !client->shared || client->terminated_ns || node->unloaded ||
	    atomic_load(&client->shared->leaving) || !is_busy(node, client))
		return;
	for (struct client *other = node->clients; other; other = other->next)
		if (other != client && other->mps && other->shared && !other->broken && !other->doomed)
			break_client(node, other);
}

static uint32_t terminate(struct node *node, uint64_t id)
{
	for (struct client *other = node->clients; other; other = other->next)
		if (other->mps && other->id == id && other->shared) {
			other->terminate_at_ns = clock_ns() + TERMINATE_NS;
			return 0;
		}
	return ESRCH;
}

void mps_run(struct node *node, uint64_t now_ns)
{
	for (struct client *client = node->clients; client; client = client->next)
		if (client->terminate_at_ns && now_ns >= client->terminate_at_ns && !client->doomed) {
			client->terminated_ns = now_ns;
			atomic_store(&client->shared->gone, MPS_CLIENT_TERMINATED);
			client->doomed = true;
		}
}

uint64_t mps_next(const struct node *node, uint64_t now_ns)
{
	uint64_t next = node->mps.ready_ns > now_ns ? node->mps.ready_ns : UINT64_MAX;

	for (const struct client *client = node->clients; client; client = client->next)
		if (client->terminate_at_ns && !client->doomed && client->terminate_at_ns < next)
			next = client->terminate_at_ns;
	return next;
}

/* ---- what the control program asks ---- */

static void answer_status(const struct node *node, struct client *client)
{
	uint64_t now_ns = clock_ns();
	struct mps_status status = {.running = node->mps.running,
				    .started = node->mps.started && now_ns + LISTED_BEFORE_NS >= node->mps.ready_ns,
				    .ready = node->mps.started && now_ns >= node->mps.ready_ns,
				    .server_pid = mps_server_pid(node),
				    .default_percentage = node->mps.default_percentage,
				    .percentage = node->mps.percentage,
				    .default_priority = node->mps.default_priority};

	memcpy(status.default_memory, node->mps.default_memory, sizeof(status.default_memory));
	memcpy(status.memory, node->mps.memory, sizeof(status.memory));
	for (struct client *other = node->clients; other; other = other->next)
		status.clients += other->mps && other->shared;
	query_reply(client, 0, &status, 1, sizeof(status));
}

void mps_reset(struct node *node, bool running)
{
	stop_server(node);
	node->mps = (struct mps){.running = running, .default_percentage = ALL_SMS, .percentage = ALL_SMS};
}

static uint32_t set_server(struct node *node, bool started)
{
	if (started)
		start_server(node);
	else
		stop_server(node);
	return 0;
}

static uint32_t set(struct node *node, const struct query *query)
{
	struct mps *mps = &node->mps;

	if (!mps->running)
		return ENOTCONN;
	if (strcmp(query->text, "server") == 0)
		return set_server(node, query->a != 0);
	if (strcmp(query->text, "default-percentage") == 0 && query->a >= 1 && query->a <= ALL_SMS)
		mps->default_percentage = (uint32_t)query->a;
	else if (strcmp(query->text, "percentage") == 0 && query->a >= 1 && query->a <= ALL_SMS)
		mps->percentage = (uint32_t)query->a;
	else if (strcmp(query->text, "default-priority") == 0 && query->a <= 1)
		mps->default_priority = (int32_t)query->a;
	else if (strcmp(query->text, "default-memory") == 0 && query->b < MAX_DEVICES)
		mps->default_memory[query->b] = query->a;
	else if (strcmp(query->text, "memory") == 0 && query->b < MAX_DEVICES)
		mps->memory[query->b] = query->a;
	else
		return EINVAL;
	return 0;
}

static void answer_clients(const struct node *node, struct client *client)
{
	struct mps_client *found = NULL;
	size_t count = 0;

	for (struct client *other = node->clients; other; other = other->next)
		for (uint32_t d = 0; d < device_count(node->model) && other->mps; d++) {
			if (!other->contexts[d])
				continue;
			found = realloc(found, (count + 1) * sizeof(*found));
			if (!found)
				abort();
			found[count++] = (struct mps_client){other->id, other->pid, d, other->percentage};
		}
	query_reply(client, 0, found, count, sizeof(*found));
	free(found);
}

void mps_answer(struct node *node, struct client *client, const struct query *query)
{
	if (query->op == Q_MPS_STATUS) {
		answer_status(node, client);
	} else if (query->op == Q_MPS_CLIENTS) {
		answer_clients(node, client);
	} else if (query->op == Q_MPS_SET) {
		query_reply(client, set(node, query), NULL, 0, 0);
	} else if (query->op == Q_MPS_TERMINATE) {
		query_reply(client, terminate(node, query->a), NULL, 0, 0);
	} else {
		mps_reset(node, query->op == Q_MPS_START);
		query_reply(client, 0, NULL, 0, 0);
	}
}
