/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* gpusim: the server of the simulated GPU, and the commands that ask it. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "server.h"

#define SAMPLE_NS 200000000ull /* as on an H200 with 580.159.04 */

static volatile sig_atomic_t ending;

static void end(int number)
{
	(void)number;
	ending = 1;
}

uint64_t clock_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void die(const char *what)
{
	fprintf(stderr, "gpusim: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* ---- connections ---- */

/* epoll goes by what is open: a child of ours may still have a copy, and what came of it would name a client that is gone. */
void close_watched(const struct node *node, int fd)
{
	if (fd < 0)
		return;
	epoll_ctl(node->epoll, EPOLL_CTL_DEL, fd, NULL);
	close(fd);
}

static void drop(struct node *node, struct client *client)
{
	struct client **link = &node->clients;

	while (*link != client)
		link = &(*link)->next;
	*link = client->next;
	if (client->kind == HELLO_CUDA) {
		mps_client_ends(node, client);
		client_end_cuda(node, client);
	}
	close_watched(node, client->pid_fd);
	close_watched(node, client->socket);
	free(client->output);
	free(client);
}

static void read_name(struct client *client)
{
	char path[64];
	ssize_t length;
	int file;

	snprintf(path, sizeof(path), "/proc/%u/comm", client->pid);
	file = open(path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return;
	length = read(file, client->command, sizeof(client->command) - 1);
	if (length > 0 && client->command[length - 1] == '\n')
		client->command[length - 1] = 0;
	close(file);
}

static void accept_client(struct node *node)
{
	struct ucred peer;
	socklen_t size = sizeof(peer);
	int socket = accept4(node->listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	struct client *client;
	struct epoll_event event = {.events = EPOLLIN};

	if (socket < 0)
		return;
	if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || !(client = calloc(1, sizeof(*client)))) {
		close(socket);
		return;
	}
	client->socket = socket;
	client->doorbell = -1;
	client->pid = (uint32_t)peer.pid;
	client->uid = (uint32_t)peer.uid;
	client->id = ++node->next_id;
	client->pid_fd = (int)syscall(SYS_pidfd_open, peer.pid, 0);
	read_name(client);
	client->next = node->clients;
	node->clients = client;
	event.data.ptr = client;
	if (epoll_ctl(node->epoll, EPOLL_CTL_ADD, socket, &event) < 0)
		client->doomed = true;
	event.data.u64 |= OF_PROCESS;
	if (client->pid_fd < 0 || epoll_ctl(node->epoll, EPOLL_CTL_ADD, client->pid_fd, &event) < 0)
		client->doomed = true; /* it is dead already, or its death could not be seen */
}

void client_send(struct node *node, struct client *client)
{
	struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = client};
	ssize_t sent;

	while (client->output_sent < client->output_length) {
		sent = send(client->socket, client->output + client->output_sent,
			    client->output_length - client->output_sent, MSG_NOSIGNAL | MSG_DONTWAIT);
		if (sent < 0 && errno == EAGAIN) {
			epoll_ctl(node->epoll, EPOLL_CTL_MOD, client->socket, &event);
			return;
		}
		if (sent <= 0) {
			client->doomed = true;
			return;
		}
		client->output_sent += (size_t)sent;
	}
	client->output_sent = client->output_length = 0;
	event.events = EPOLLIN;
	epoll_ctl(node->epoll, EPOLL_CTL_MOD, client->socket, &event);
}

static bool begin(struct node *node, struct client *client)
{
	if (client->hello.magic != GPUSIM_MAGIC || client->hello.version != GPUSIM_VERSION)
		return false;
	if (client->hello.kind < HELLO_CUDA || client->hello.kind > HELLO_NVML)
		return false;
	if (node->unloaded && client->hello.kind != HELLO_QUERY)
		return false;
	client->kind = client->hello.kind;
	return client->kind != HELLO_CUDA || client_begin_cuda(node, client);
}

/* One message from the front of the input; false when it is not all there yet. */
static bool use_message(struct node *node, struct client *client)
{
	struct query query;
	size_t wanted = client->kind ? sizeof(query) : sizeof(struct hello);

	if (client->doomed || client->question.op || client->input_length < wanted)
		return false;
	if (!client->kind) {
		memcpy(&client->hello, client->input, sizeof(client->hello));
		if (mps_makes_wait(node, &client->hello))
			return false;
		client->doomed = !begin(node, client);
	} else if (client->kind != HELLO_CUDA) {
		memcpy(&query, client->input, sizeof(query));
		query.text[sizeof(query.text) - 1] = query.name[sizeof(query.name) - 1] = 0;
		clients_run(node, clock_ns()); /* the answer is about now, not about when we last woke */
		query_answer(node, client, &query);
		client_send(node, client);
	}
	client->input_length -= wanted;
	memmove(client->input, client->input + wanted, client->input_length);
	return true;
}

static void read_client(struct node *node, struct client *client)
{
	ssize_t got = recv(client->socket, client->input + client->input_length,
			   sizeof(client->input) - client->input_length, MSG_DONTWAIT);

	if (got == 0 || (got < 0 && errno != EAGAIN))
		client->doomed = true;
	if (got > 0) {
		client->input_length += (size_t)got;
		while (use_message(node, client))
			;
	}
}

static void serve_client(struct node *node, struct client *client, uint32_t events)
{
	if (events & (EPOLLHUP | EPOLLERR))
		client->doomed = true;
	if (client->output_length)
		client_send(node, client);
	if (!client->output_length)
		read_client(node, client);
}

/* A doorbell only wakes us; a pidfd is readable once its process has ended, whatever else holds the socket. */
static void serve_ready(struct node *node, const struct epoll_event *event)
{
	struct client *client = (struct client *)(event->data.u64 & ~(uint64_t)OF_MASK);

	if ((event->data.u64 & OF_MASK) == OF_PROCESS)
		client->doomed = true;
	else if ((event->data.u64 & OF_MASK) == OF_SOCKET)
		serve_client(node, client, event->events);
}

/* ---- the loop ---- */

static void sleep_until(struct node *node, uint64_t at_ns)
{
	struct itimerspec when = {.it_value = {(time_t)(at_ns / 1000000000u), (long)(at_ns % 1000000000u)}};

	timerfd_settime(node->timer, TFD_TIMER_ABSTIME, &when, NULL);
}

static void serve_events(struct node *node, int timeout)
{
	struct epoll_event events[64];
	int count = epoll_wait(node->epoll, events, 64, timeout);
	uint64_t expirations;

	for (int i = 0; i < count; i++) {
		if (events[i].data.ptr == &node->listener)
			accept_client(node);
		else if (events[i].data.ptr == &node->timer)
			(void)!read(node->timer, &expirations, sizeof(expirations));
		else
			serve_ready(node, &events[i]);
	}
}

static void drop_doomed(struct node *node)
{
	for (struct client *client = node->clients, *next; client; client = next) {
		next = client->next;
		if (client->doomed)
			drop(node, client);
	}
}

/* Those that wait for the MPS server. */
static void serve_newcomers(struct node *node)
{
	for (struct client *client = node->clients; client; client = client->next)
		while (!client->kind && use_message(node, client))
			;
}

static void run(struct node *node)
{
	uint64_t now, next, sample = clock_ns() + SAMPLE_NS;

	while (!ending) {
		now = clock_ns();
		clients_run(node, now);
		checkpoints_run(node, now);
		mps_run(node, now);
		serve_newcomers(node);
		clients_wake(node);
		if (now >= sample) {
			samples_take(node, now);
			sample += (now - sample) / SAMPLE_NS * SAMPLE_NS + SAMPLE_NS;
		}
		drop_doomed(node);
		next = model_next(node->model);
		if (checkpoints_next(node, now) < next)
			next = checkpoints_next(node, now);
		if (mps_next(node, now) < next)
			next = mps_next(node, now);
		sleep_until(node, next < sample ? next : sample);
		serve_events(node, clients_idle(node) && next > clock_ns() ? -1 : 0);
	}
}

/* ---- start ---- */

static void make_facts(struct node *node)
{
	for (unsigned d = 0; d < node->config.gpus; d++) {
		struct device_facts *facts = &node->facts[d];

		*facts = (struct device_facts){.index = d,
					       .gpu = d,
					       .present = 1,
					       .sms = device_sms(node->model, d),
					       .memory_bytes = node->config.memory_bytes,
					       .copy_bytes_per_second = node->config.copy_bytes_per_second};
		snprintf(facts->uuid, sizeof(facts->uuid), "GPU-%08x-51a1-4000-8000-%012x", 0x5e1f0000u + d, d + 1);
		snprintf(facts->name, sizeof(facts->name), "%s", node->config.name);
		snprintf(facts->pci_bus_id, sizeof(facts->pci_bus_id), "00000000:%02X:00.0", d + 1);
	}
	for (unsigned gpu = 0; gpu < node->config.gpus; gpu++)
		if (node->config.mig_mode[gpu])
			mig_split(node, gpu, true, node->config.mig[gpu]);
}

static void listen_at(struct node *node, const char *dir)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	int probe;

	mkdir(dir, 0755);
	if ((size_t)snprintf(address.sun_path, sizeof(address.sun_path), "%s/" GPUSIM_SOCKET, dir) >=
	    sizeof(address.sun_path)) {
		fprintf(stderr, "gpusim: %s is too long for a socket's path; use a shorter --dir\n", dir);
		exit(2);
	}
	probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connect(probe, (struct sockaddr *)&address, sizeof(address)) == 0) {
		fprintf(stderr, "gpusim: a server runs in %s already; stop it or use another --dir\n", dir);
		exit(1);
	}
	close(probe);
	unlink(address.sun_path);
	node->listener = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (bind(node->listener, (struct sockaddr *)&address, sizeof(address)) < 0 || listen(node->listener, 512) < 0)
		die(address.sun_path);
	chmod(address.sun_path, 0777); /* containers' users may use the GPU, as /dev/nvidia* lets them */
}

static void open_loop(struct node *node)
{
	struct epoll_event listener = {.events = EPOLLIN, .data.ptr = &node->listener};
	struct epoll_event timer = {.events = EPOLLIN, .data.ptr = &node->timer};

	node->epoll = epoll_create1(EPOLL_CLOEXEC);
	node->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
	if (node->epoll < 0 || node->timer < 0 ||
	    epoll_ctl(node->epoll, EPOLL_CTL_ADD, node->listener, &listener) < 0 ||
	    epoll_ctl(node->epoll, EPOLL_CTL_ADD, node->timer, &timer) < 0)
		die("epoll");
}

/* Hardware does not wait for a CPU: without real-time priority (refused in some containers) its events come later. */
static void hurry(void)
{
	struct sched_param priority = {.sched_priority = 10};

	sched_setscheduler(0, SCHED_FIFO | SCHED_RESET_ON_FORK, &priority);
	prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
}

static int serve(const char *dir, const char *config)
{
	struct node *node = calloc(1, sizeof(*node));
	char path[sizeof(((struct sockaddr_un *)0)->sun_path) + 1];
	struct sigaction on_end = {.sa_handler = end};

	if (!node)
		die("memory");
	config_load(&node->config, config);
	sigaction(SIGTERM, &on_end, NULL);
	sigaction(SIGINT, &on_end, NULL);
	signal(SIGPIPE, SIG_IGN);
	node->mps = (struct mps){.running = node->config.mps, .default_percentage = ALL_SMS, .percentage = ALL_SMS};
	node->model = model_new(&node->config, &CLIENT_EVENTS);
	make_facts(node);
	listen_at(node, dir);
	open_loop(node);
	hurry();
	node->sampled_ns = clock_ns();
	node->random = node->sampled_ns | 1;
	model_advance(node->model, node->sampled_ns);
	puts("ready");
	fflush(stdout);
	run(node);
	snprintf(path, sizeof(path), "%s/" GPUSIM_SOCKET, dir);
	unlink(path);
	node->unloaded = true;
	while (node->clients)
		drop(node, node->clients);
	mps_end(node);
	model_free(node->model);
	free(node);
	return 0;
}

int main(int argc, char **argv)
{
	const char *dir = getenv("GPUSIM_DIR") ? getenv("GPUSIM_DIR") : GPUSIM_DEFAULT_DIR, *config = NULL;

	if (argc == 1 && strcmp(argv[0], MPS_SERVER_NAME) == 0)
		for (;;)
			pause();
	if (argc < 2 || strcmp(argv[1], "serve") != 0)
		return cli(argc, argv);
	for (int i = 2; i < argc; i++) {
		if (strcmp(argv[i], "--dir") == 0 && i + 1 < argc) {
			dir = argv[++i];
		} else if (strcmp(argv[i], "--config") == 0 && i + 1 < argc) {
			config = argv[++i];
		} else {
			fprintf(stderr, "usage: gpusim serve [--dir DIR] [--config FILE]\n");
			return 2;
		}
	}
	return serve(dir, config);
}
