/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "server.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CUDA_OK 0
#define CUDA_INVALID_VALUE 1
#define CUDA_OUT_OF_MEMORY 2
#define CUDA_DEVICE_UNAVAILABLE 46
#define CUDA_NO_DEVICE 100
#define FIRST_ADDRESS 0x700000000000ull
#define ALIGNMENT 512
#define MOST_QUEUED 262144 /* operations of one client on one device; one that obeys QUEUE_DEPTH stays far below */

static bool send_welcome(const struct node *node, const struct client *client, int memory)
{
	struct welcome welcome = {
		.magic = GPUSIM_MAGIC, .devices = device_count(node->model), .launch_ns = node->config.launch_ns};
	char control[CMSG_SPACE(2 * sizeof(int))] = {0};
	struct iovec part = {&welcome, sizeof(welcome)};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	struct cmsghdr *header = CMSG_FIRSTHDR(&message);
	int fds[2] = {memory, client->doorbell};

	memcpy(welcome.facts, node->facts, sizeof(welcome.facts));
	header->cmsg_level = SOL_SOCKET;
	header->cmsg_type = SCM_RIGHTS;
	header->cmsg_len = CMSG_LEN(sizeof(fds));
	memcpy(CMSG_DATA(header), fds, sizeof(fds));
	return sendmsg(client->socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT) == (ssize_t)sizeof(welcome);
}

static void take_mps_limits(struct node *node, struct client *client)
{
	const struct hello *hello = &client->hello;
	const struct mps *mps = &node->mps;
	unsigned own = hello->mps_percentage > 0 ? (unsigned)hello->mps_percentage : 100, percentage;

	client->mps = mps->running && hello->mps;
	if (!client->mps)
		return;
	percentage = (mps->percentage + ALL_SMS / 100 - 1) / (ALL_SMS / 100);
	client->percentage = own < percentage ? own : percentage; /* a client can only lower it */
	client->priority = hello->mps_priority >= 0 ? hello->mps_priority : mps->default_priority;
	for (unsigned d = 0; d < MAX_DEVICES; d++) {
		uint64_t limit = mps->memory[d], wanted = hello->mps_pinned_bytes[d];

		client->memory_limit[d] = wanted && (!limit || wanted < limit) ? wanted : limit;
	}
}

bool client_begin_cuda(struct node *node, struct client *client)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLET, .data.u64 = (uintptr_t)client | OF_DOORBELL};
	int memory = memfd_create("gpusim", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	bool sent;

	client->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
	if (memory < 0 || client->doorbell < 0 || ftruncate(memory, sizeof(struct shared)) < 0 ||
	    fcntl(memory, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0)
		goto failed;
	client->shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
	if (client->shared == MAP_FAILED) {
		client->shared = NULL;
		goto failed;
	}
	take_mps_limits(node, client);
	sent = send_welcome(node, client, memory);
	close(memory);
	return sent && epoll_ctl(node->epoll, EPOLL_CTL_ADD, client->doorbell, &event) == 0;
failed:
	if (memory >= 0)
		close(memory);
	return false;
}

static void wake(struct shared *shared)
{
	atomic_thread_fence(memory_order_seq_cst);
	if (!atomic_load(&shared->waiters))
		return;
	atomic_fetch_add(&shared->progress, 1);
	syscall(SYS_futex, &shared->progress, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void client_end_cuda(struct node *node, struct client *client)
{
	for (unsigned d = 0; d < device_count(node->model); d++) {
		if (client->contexts[d])
			context_end(client->contexts[d]);
		if (client->records[d])
			record_dead(client->records[d]);
		if (client->contexts[d] && !client->swapped)
			memory_give(node->model, d, node->config.context_bytes);
	}
	for (size_t i = 0; i < client->allocation_count && !client->swapped; i++)
		memory_give(node->model, client->allocations[i].device, client->allocations[i].bytes);
	free(client->allocations);
	if (client->shared) {
		if (!atomic_load(&client->shared->gone))
			atomic_store(&client->shared->gone, CUDA_DEVICE_UNAVAILABLE);
		wake(client->shared);
		munmap(client->shared, sizeof(struct shared));
	}
	close_watched(node, client->doorbell);
}

/* ---- what the model tells ---- */

static void on_completed(void *owner, uint32_t stream, uint64_t sequence)
{
	struct client *client = owner;

	atomic_store(&client->shared->completed[stream], sequence);
	client->dirty = true;
}

static void on_mark(void *owner, uint32_t mark, uint64_t at_ns)
{
	struct client *client = owner;

	if (mark < MAX_MARKS)
		atomic_store(&client->shared->marks[mark], at_ns);
	client->dirty = true;
}

const struct model_events CLIENT_EVENTS = {on_completed, on_mark};

/* ---- requests with an answer ---- */

static void forget_allocation(struct node *node, struct client *client, size_t i)
{
	const struct allocation *gone = &client->allocations[i];

	memory_give(node->model, gone->device, gone->bytes);
	client->records[gone->device]->truth.memory_bytes -= gone->bytes;
	client->allocations[i] = client->allocations[--client->allocation_count];
}

static int context_open(struct node *node, struct client *client, uint32_t device)
{
	if (client->contexts[device])
		return CUDA_OK;
	if (!node->facts[device].present || node->facts[device].mig_mode)
		return CUDA_NO_DEVICE; /* it was split or reconfigured after the client came */
	if (!memory_take(node->model, device, node->config.context_bytes))
		return CUDA_OUT_OF_MEMORY;
	if (!client->records[device])
		client->records[device] = record_new(node->model, device, client->pid, client->mps, client->command);
	client->records[device]->truth.memory_bytes += node->config.context_bytes;
	client->contexts[device] = context_new(node->model, device, client, client->records[device], client->mps,
					       client->percentage, client->priority);
	return CUDA_OK;
}

static int context_close(struct node *node, struct client *client, uint32_t device)
{
	if (!client->contexts[device])
		return CUDA_INVALID_VALUE;
	for (uint32_t s = 0; s < MAX_STREAMS; s++)
		if (client->streams[s] && stream_context(client->streams[s]) == client->contexts[device])
			client->streams[s] = NULL;
	context_end(client->contexts[device]);
	client->contexts[device] = NULL;
	for (size_t i = client->allocation_count; i-- > 0;)
		if (client->allocations[i].device == device)
			forget_allocation(node, client, i);
	memory_give(node->model, device, node->config.context_bytes);
	client->records[device]->truth.memory_bytes -= node->config.context_bytes;
	return CUDA_OK;
}

static int allocate(struct node *node, struct client *client, const struct command *command, uint64_t *address)
{
	uint64_t bytes = (command->a + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT,
		 limit = client->memory_limit[command->device];
	struct record *record = client->records[command->device];

	if (!client->contexts[command->device] || !bytes || bytes < command->a)
		return CUDA_INVALID_VALUE;
	if ((limit && record->truth.memory_bytes + bytes > limit) || !memory_take(node->model, command->device, bytes))
		return CUDA_OUT_OF_MEMORY;
	if (client->allocation_count == client->allocation_room) {
		client->allocation_room = client->allocation_room ? client->allocation_room * 2 : 64;
		client->allocations = realloc(client->allocations, client->allocation_room * sizeof(struct allocation));
		if (!client->allocations)
			abort();
	}
	if (!node->next_address)
		node->next_address = FIRST_ADDRESS;
	*address = node->next_address;
	node->next_address += bytes;
	client->allocations[client->allocation_count++] = (struct allocation){*address, bytes, command->device, false};
	record->truth.memory_bytes += bytes;
	record->truth.allocations++;
	return CUDA_OK;
}

static int release(struct node *node, struct client *client, uint64_t address, uint64_t *bytes)
{
	for (size_t i = client->allocation_count; i-- > 0;)
		if (client->allocations[i].address == address) {
			*bytes = client->allocations[i].bytes;
			forget_allocation(node, client, i);
			return CUDA_OK;
		}
	return CUDA_INVALID_VALUE;
}

static void memory_info(const struct node *node, const struct client *client, uint32_t device, uint64_t values[2])
{
	struct device_state state;
	uint64_t limit = client->memory_limit[device], total = node->facts[device].memory_bytes, own = 0, left;

	device_read(node->model, device, &state);
	left = total - state.memory_used;
	if (limit && limit < total) {
		own = client->records[device] ? client->records[device]->truth.memory_bytes : 0;
		total = limit;
		left = own >= limit ? 0 : left < limit - own ? left : limit - own;
	}
	values[0] = left;
	values[1] = total;
}

/* ---- memory of other processes ---- */

static struct allocation *allocation_at(struct client *client, uint64_t address)
{
	for (size_t i = 0; i < client->allocation_count; i++)
		if (client->allocations[i].address == address)
			return &client->allocations[i];
	return NULL;
}

static int ipc_export(struct client *client, uint64_t address)
{
	struct allocation *allocation = allocation_at(client, address);

	if (allocation)
		allocation->exported = true;
	return allocation ? CUDA_OK : CUDA_INVALID_VALUE;
}

static int ipc_open(struct node *node, struct client *client, uint64_t address)
{
	for (struct client *other = node->clients; other; other = other->next) {
		const struct allocation *allocation = other == client ? NULL : allocation_at(other, address);

		if (!allocation || !allocation->exported)
			continue;
		client->opened++;
		return CUDA_OK;
	}
	return CUDA_INVALID_VALUE;
}

static int ipc_close(struct client *client)
{
	if (!client->opened)
		return CUDA_INVALID_VALUE;
	client->opened--;
	return CUDA_OK;
}

static void answer(struct node *node, struct client *client, const struct command *command)
{
	struct reply *reply = &client->shared->replies[command->reply];
	uint64_t values[2] = {0};
	int result = CUDA_OK;

	if (command->kind == CMD_CONTEXT_NEW)
		result = context_open(node, client, command->device);
	else if (command->kind == CMD_CONTEXT_END)
		result = context_close(node, client, command->device);
	else if (command->kind == CMD_ALLOC)
		result = allocate(node, client, command, &values[0]);
	else if (command->kind == CMD_FREE)
		result = release(node, client, command->a, &values[0]);
	else if (command->kind == CMD_IPC_EXPORT)
		result = ipc_export(client, command->a);
	else if (command->kind == CMD_IPC_OPEN)
		result = ipc_open(node, client, command->a);
	else if (command->kind == CMD_IPC_CLOSE)
		result = ipc_close(client);
	else
		memory_info(node, client, command->device, values);
	memcpy(reply->values, values, sizeof(values));
	reply->result = result;
	atomic_store(&reply->done, 1);
	client->dirty = true;
}

/* ---- the ring ---- */

static bool stream_open(struct client *client, const struct command *command)
{
	if (command->stream >= MAX_STREAMS || client->streams[command->stream] || !client->contexts[command->device])
		return false;
	client->streams[command->stream] =
		stream_new(client->contexts[command->device], command->stream, (int)(int64_t)command->a);
	atomic_store(&client->shared->completed[command->stream], 0);
	return true;
}

/* False when no client of ours would send this. */
static bool obey(struct node *node, struct client *client, const struct command *command)
{
	struct stream *stream = command->stream < MAX_STREAMS ? client->streams[command->stream] : NULL;
	struct stream *awaited = NULL;

	if (command->device >= device_count(node->model) || command->reply >= MAX_REPLIES)
		return false;
	if (client->state != STATE_RUNNING)
		return false; /* who is locked sends nothing */
	switch (command->kind) {
	case CMD_STREAM_NEW:
		return stream_open(client, command);
	case CMD_STREAM_END:
		if (!stream)
			return false;
		client->streams[command->stream] = NULL;
		stream_end(stream);
		return true;
	case CMD_WAIT:
		if (command->a >= MAX_STREAMS)
			return false;
		awaited = client->streams[command->a];
		break;
	case CMD_KERNEL:
		if (!command->a || !command->b || command->b > 1024)
			return false;
		break;
	case CMD_COPY:
		if (command->a > COPY_PEER ||
		    (command->a == COPY_PEER && (command->c >= MAX_DEVICES || command->d >= MAX_DEVICES)))
			return false;
		break;
	case CMD_MARK:
		break;
	case CMD_CONTEXT_NEW:
	case CMD_CONTEXT_END:
	case CMD_ALLOC:
	case CMD_FREE:
	case CMD_MEMORY_INFO:
	case CMD_IPC_EXPORT:
	case CMD_IPC_OPEN:
	case CMD_IPC_CLOSE:
		answer(node, client, command);
		return true;
	default:
		return false;
	}
	if (!stream || context_queued(stream_context(stream)) >= MOST_QUEUED)
		return false;
	stream_submit(stream, command, awaited);
	return true;
}

/*
 * How far this round goes: what was published when it began. A client that publishes without end waits for the next round, so
 * that time and the others get on. A head that cannot be is the end of the client.
 */
static void look(struct client *client)
{
	uint64_t head;

	if (!client->shared || client->doomed || client->broken)
		return;
	head = atomic_load(&client->shared->head);
	if (head - client->tail > RING_COMMANDS)
		client->doomed = true;
	else
		client->seen = head;
}

static const struct command *peek(const struct client *client)
{
	if (client->doomed || client->broken || client->seen == client->tail)
		return NULL;
	return &client->shared->ring[client->tail % RING_COMMANDS];
}

static void take(struct node *node, struct client *client, uint64_t to)
{
	struct command command =
		client->shared->ring[client->tail % RING_COMMANDS]; /* a copy: the client may scribble */

	if (command.at_ns > to)
		command.at_ns = to;
	model_advance(node->model, command.at_ns);
	client->tail++;
	atomic_store(&client->shared->tail, client->tail);
	client->dirty = true;
	if (!obey(node, client, &command))
		client->doomed = true;
}

static struct client *earliest_client(struct node *node, uint64_t *at_ns)
{
	struct client *best = NULL;

	for (struct client *client = node->clients; client; client = client->next) {
		const struct command *command = peek(client);
		uint64_t at = command ? command->at_ns : UINT64_MAX;

		if (command && (!best || at < *at_ns)) {
			best = client;
			*at_ns = at;
		}
	}
	return best;
}

void clients_run(struct node *node, uint64_t to)
{
	for (struct client *client = node->clients; client; client = client->next)
		look(client);
	for (;;) {
		uint64_t at_ns = 0, next = model_next(node->model);
		struct client *client = earliest_client(node, &at_ns);

		if (client && (at_ns <= next || next > to))
			take(node, client, to);
		else if (!model_step(node->model, to))
			break;
	}
	model_advance(node->model, to);
}

bool clients_idle(const struct node *node)
{
	for (struct client *client = node->clients; client; client = client->next)
		if (client->shared && !client->doomed && !client->broken &&
		    atomic_load(&client->shared->head) != client->tail)
			return false;
	return true;
}

void clients_wake(struct node *node)
{
	for (struct client *client = node->clients; client; client = client->next)
		if (client->dirty) {
			client->dirty = false;
			wake(client->shared);
		}
}
