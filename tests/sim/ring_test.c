/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The server against clients that speak its protocol by hand, badly, or for a while only. `ring_test` lists the tests,
 * `ring_test NAME` runs one against the server in $GPUSIM_DIR.
 */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>

#include "query.h"

enum { DEADLINE_S = 20, STORM = 200, CUDA_OUT_OF_MEMORY = 2 };

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                        \
			exit(1);                                                                                       \
		}                                                                                                      \
	} while (0)

struct peer {
	int socket, doorbell;
	struct shared *shared;
	uint64_t sequence; /* of stream 0 */
};

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void nap(void)
{
	nanosleep(&(struct timespec){.tv_nsec = 100000}, NULL);
}

static struct peer dial(void)
{
	struct sockaddr_un name = {.sun_family = AF_UNIX};
	struct hello hello = {.magic = GPUSIM_MAGIC, .version = GPUSIM_VERSION, .kind = HELLO_CUDA, .mps_priority = -1};
	struct peer peer = {.socket = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
	struct welcome welcome;
	char control[256];
	struct iovec part = {&welcome, sizeof(welcome)};
	struct msghdr message = {
		.msg_iov = &part, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
	int fds[2];

	snprintf(name.sun_path, sizeof(name.sun_path), "%s/%s", getenv("GPUSIM_DIR"), GPUSIM_SOCKET);
	CHECK(connect(peer.socket, (struct sockaddr *)&name, sizeof(name)) == 0);
	CHECK(query_send(peer.socket, &hello, sizeof(hello)));
	CHECK(recvmsg(peer.socket, &message, MSG_WAITALL) == (ssize_t)sizeof(welcome));
	memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fds));
	peer.shared = mmap(NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED, fds[0], 0);
	CHECK(peer.shared != MAP_FAILED);
	close(fds[0]);
	peer.doorbell = fds[1];
	return peer;
}

static void hang_up(struct peer *peer)
{
	munmap(peer->shared, sizeof(struct shared));
	close(peer->doorbell);
	close(peer->socket);
}

static void ring(const struct peer *peer)
{
	CHECK(eventfd_write(peer->doorbell, 1) == 0 || errno == EAGAIN);
}

static void put(struct peer *peer, struct command command)
{
	uint64_t head = atomic_load(&peer->shared->head);

	command.at_ns = command.at_ns ? command.at_ns : now_ns();
	peer->shared->ring[head % RING_COMMANDS] = command;
	atomic_store(&peer->shared->head, head + 1);
	ring(peer);
}

static bool dropped(const struct peer *peer)
{
	struct pollfd end = {.fd = peer->socket, .events = POLLIN | POLLRDHUP};

	return poll(&end, 1, 0) > 0 && (end.revents & (POLLHUP | POLLRDHUP));
}

static int ask(struct peer *peer, struct command command, uint64_t *value)
{
	struct reply *reply = &peer->shared->replies[0];
	uint64_t deadline = now_ns() + DEADLINE_S * 1000000000ull;

	atomic_store(&reply->done, 0);
	put(peer, command);
	while (!atomic_load(&reply->done)) {
		CHECK(!dropped(peer));
		CHECK(now_ns() < deadline);
		nap();
	}
	if (value)
		*value = reply->values[0];
	return reply->result;
}

static void open_stream(struct peer *peer)
{
	CHECK(ask(peer, (struct command){.kind = CMD_CONTEXT_NEW}, NULL) == 0);
	put(peer, (struct command){.kind = CMD_STREAM_NEW});
}

static void launch(struct peer *peer, uint64_t ns)
{
	put(peer,
	    (struct command){.kind = CMD_KERNEL, .sequence = ++peer->sequence, .a = 264, .b = 1024, .c = ns, .d = 1});
}

static void wait_done(struct peer *peer)
{
	uint64_t deadline = now_ns() + DEADLINE_S * 1000000000ull;

	while (atomic_load(&peer->shared->completed[0]) < peer->sequence) {
		CHECK(!dropped(peer));
		CHECK(now_ns() < deadline);
		nap();
	}
}

/* What any orderly client may expect at any time. */
static void work(struct peer *peer)
{
	launch(peer, 100000);
	wait_done(peer);
}

static struct device_state device_now(void)
{
	struct query query = {.op = Q_DEVICE_STATE};
	struct answer answer;
	struct device_state state;
	void *items;
	int fd = query_connect();

	CHECK(fd >= 0 && query_ask(fd, &query, &answer, &items) && answer.count == 1);
	memcpy(&state, items, sizeof(state));
	free(items);
	close(fd);
	return state;
}

static void until_memory_is(uint64_t bytes)
{
	uint64_t deadline = now_ns() + DEADLINE_S * 1000000000ull;

	while (device_now().memory_used != bytes) {
		CHECK(now_ns() < deadline);
		nap();
	}
}

static void until_dropped(const struct peer *peer)
{
	uint64_t deadline = now_ns() + DEADLINE_S * 1000000000ull;

	while (!dropped(peer)) {
		CHECK(now_ns() < deadline);
		nap();
	}
}

/* ---- the tests ---- */

static void an_answer_is_about_now(void)
{
	for (int i = 0; i < 5; i++) {
		uint64_t before = now_ns();
		uint64_t answered_ns = device_now().at_ns;

		CHECK(answered_ns >= before && answered_ns <= now_ns());
		for (int j = 0; j < 100; j++)
			nap();
	}
}

static void a_kernel_that_runs_counts_already(void)
{
	struct peer peer = dial();
	uint64_t before, during;

	open_stream(&peer);
	work(&peer);
	before = device_now().busy_ns;
	launch(&peer, 2000000000);
	for (int i = 0; i < 1000; i++)
		nap();
	during = device_now().busy_ns;
	CHECK(during - before >= 50000000);
	CHECK(atomic_load(&peer.shared->completed[0]) < peer.sequence);
}

static void rubbish_only_disconnects_its_writer(void)
{
	static const struct command RUBBISH[] = {
		{.kind = 0},
		{.kind = 4711},
		{.kind = CMD_KERNEL, .stream = 7, .a = 1, .b = 1},
		{.kind = CMD_KERNEL, .stream = 4000000000u, .a = 1, .b = 1},
		{.kind = CMD_KERNEL, .sequence = 1, .a = 0, .b = 32},
		{.kind = CMD_KERNEL, .sequence = 1, .a = 1, .b = 1025},
		{.kind = CMD_COPY, .sequence = 1, .a = 9, .b = 1},
		{.kind = CMD_WAIT, .sequence = 1, .a = 1ull << 40, .b = 1},
		{.kind = CMD_STREAM_NEW},
		{.kind = CMD_STREAM_NEW, .stream = 100000},
		{.kind = CMD_STREAM_END, .stream = 3},
		{.kind = CMD_MEMORY_INFO, .device = 99},
		{.kind = CMD_MEMORY_INFO, .reply = 1u << 31},
	};
	struct peer good = dial();
	uint64_t used = device_now().memory_used;

	open_stream(&good);
	used = device_now().memory_used;
	for (size_t i = 0; i < sizeof(RUBBISH) / sizeof(RUBBISH[0]); i++) {
		struct peer bad = dial();

		open_stream(&bad);
		put(&bad, RUBBISH[i]);
		until_dropped(&bad);
		hang_up(&bad);
		work(&good);
	}
	until_memory_is(used);
}

static void a_head_beyond_the_ring_is_rubbish(void)
{
	struct peer good = dial(), bad = dial();

	open_stream(&good);
	atomic_store(&bad.shared->head, 1ull << 60);
	ring(&bad);
	until_dropped(&bad);
	work(&good);
}

/* Whatever bits a client writes, the others do not notice. */
static void random_bits_hurt_no_other_client(void)
{
	struct peer good = dial();
	uint64_t used;

	srandom(20261121);
	open_stream(&good);
	used = device_now().memory_used;
	for (int round = 0; round < 60; round++) {
		struct peer bad = dial();

		open_stream(&bad);
		for (int i = 0; i < 50 && !dropped(&bad); i++) {
			struct command command = {.kind = (uint32_t)random() % 14,
						  .stream = (uint32_t)random() % 3,
						  .reply = (uint32_t)random() % 64,
						  .sequence = (uint64_t)random() << (random() % 33),
						  .at_ns = random() % 2 ? now_ns() : (uint64_t)random() << 32,
						  .a = (uint64_t)random() >> (random() % 31),
						  .b = (uint64_t)random() >> (random() % 31),
						  .c = (uint64_t)random() % 100000};

			put(&bad, command);
		}
		for (size_t i = 0; i < sizeof(struct reply) * MAX_REPLIES; i++)
			((volatile unsigned char *)bad.shared->replies)[i] = (unsigned char)random();
		hang_up(&bad);
		work(&good);
	}
	until_memory_is(used);
}

static void an_endless_flood_of_requests_stalls_no_other_client(void)
{
	struct peer good = dial();
	pid_t flood;

	open_stream(&good);
	flood = fork();
	CHECK(flood >= 0);
	if (flood == 0) {
		struct peer bad = dial();

		for (;;) {
			uint64_t head = atomic_load(&bad.shared->head);

			if (head - atomic_load(&bad.shared->tail) >= RING_COMMANDS)
				continue;
			bad.shared->ring[head % RING_COMMANDS] = (struct command){.kind = CMD_MEMORY_INFO, .at_ns = 1};
			atomic_store(&bad.shared->head, head + 1);
			if (head % 1024 == 0)
				ring(&bad);
		}
	}
	for (int i = 0; i < 20; i++)
		work(&good);
	CHECK(kill(flood, SIGKILL) == 0);
	CHECK(waitpid(flood, NULL, 0) == flood);
}

/* Forks a client that allocates, launches and waits without end. */
static pid_t busy_child(unsigned seed)
{
	pid_t child = fork();
	struct peer peer;

	CHECK(child >= 0);
	if (child > 0)
		return child;
	srandom(seed);
	peer = dial();
	open_stream(&peer);
	for (;;) {
		uint64_t address;

		if (ask(&peer, (struct command){.kind = CMD_ALLOC, .a = 1 + (uint64_t)random() % 5000000}, &address) ==
			    0 &&
		    random() % 3 == 0)
			ask(&peer, (struct command){.kind = CMD_FREE, .a = address}, NULL);
		for (long n = random() % 8; n > 0; n--)
			launch(&peer, (uint64_t)random() % 100000);
		put(&peer,
		    (struct command){
			    .kind = CMD_COPY, .sequence = ++peer.sequence, .a = (uint64_t)random() % 4, .b = 9999});
		if (random() % 2)
			wait_done(&peer);
	}
}

static void sleep_up_to_5_ms(void)
{
	nanosleep(&(struct timespec){.tv_nsec = random() % 5000000}, NULL);
}

static void clients_killed_anywhere_stall_no_other_and_give_everything_back(void)
{
	struct peer good = dial();
	uint64_t used;

	srandom(4);
	open_stream(&good);
	used = device_now().memory_used;
	for (unsigned i = 0; i < STORM; i++) {
		pid_t child = busy_child(i + 1);

		sleep_up_to_5_ms();
		CHECK(kill(child, SIGKILL) == 0);
		work(&good);
		CHECK(waitpid(child, NULL, 0) == child);
	}
	until_memory_is(used);
}

static void clients_stopped_anywhere_stall_no_other(void)
{
	struct peer good = dial();
	pid_t children[4];

	srandom(5);
	open_stream(&good);
	for (unsigned c = 0; c < 4; c++)
		children[c] = busy_child(c + 1);
	for (int round = 0; round < 100; round++) {
		pid_t child = children[random() % 4];

		CHECK(kill(child, SIGSTOP) == 0);
		work(&good);
		sleep_up_to_5_ms();
		CHECK(kill(child, SIGCONT) == 0);
	}
	for (unsigned c = 0; c < 4; c++) {
		CHECK(waitpid(children[c], NULL, WNOHANG) == 0); /* it was stopped and went on, and nothing failed it */
		CHECK(kill(children[c], SIGKILL) == 0);
		CHECK(waitpid(children[c], NULL, 0) == children[c]);
	}
}

static void memory_runs_out_and_comes_back(void)
{
	struct peer peer = dial();
	uint64_t used = device_now().memory_used, address, again, left;

	CHECK(ask(&peer, (struct command){.kind = CMD_CONTEXT_NEW}, NULL) == 0);
	CHECK(ask(&peer, (struct command){.kind = CMD_MEMORY_INFO}, &left) == 0);
	CHECK(ask(&peer, (struct command){.kind = CMD_ALLOC, .a = left}, &address) == 0);
	CHECK(ask(&peer, (struct command){.kind = CMD_ALLOC, .a = 1}, &again) == CUDA_OUT_OF_MEMORY);
	CHECK(ask(&peer, (struct command){.kind = CMD_FREE, .a = address}, NULL) == 0);
	CHECK(ask(&peer, (struct command){.kind = CMD_FREE, .a = address}, NULL) != 0);
	CHECK(ask(&peer, (struct command){.kind = CMD_ALLOC, .a = 1}, &again) == 0);
	CHECK(ask(&peer, (struct command){.kind = CMD_CONTEXT_END}, NULL) == 0);
	CHECK(device_now().memory_used == used);
}

#define TEST(name)                                                                                                     \
	{                                                                                                              \
#name, name                                                                                            \
	}

static const struct {
	const char *name;
	void (*run)(void);
} TESTS[] = {
	TEST(an_answer_is_about_now),
	TEST(a_kernel_that_runs_counts_already),
	TEST(rubbish_only_disconnects_its_writer),
	TEST(a_head_beyond_the_ring_is_rubbish),
	TEST(random_bits_hurt_no_other_client),
	TEST(an_endless_flood_of_requests_stalls_no_other_client),
	TEST(clients_killed_anywhere_stall_no_other_and_give_everything_back),
	TEST(clients_stopped_anywhere_stall_no_other),
	TEST(memory_runs_out_and_comes_back),
};

int main(int argc, char **argv)
{
	for (size_t i = 0; i < sizeof(TESTS) / sizeof(TESTS[0]); i++) {
		if (argc < 2)
			puts(TESTS[i].name);
		else if (strcmp(argv[1], TESTS[i].name) == 0) {
			TESTS[i].run();
			return 0;
		}
	}
	return argc < 2 ? 0 : 2;
}
