/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "server.h"

static const char USAGE[] =
	"usage: gpusim serve [--dir DIR] [--config FILE]\n"
	"       gpusim status | truth                      (JSON, one line per device or process)\n"
	"       gpusim fault lose|restore DEVICE\n"
	"       gpusim fault xid DEVICE NUMBER [PID]\n"
	"       gpusim fault drop-samples COUNT\n"
	"       gpusim fault unsupported|supported NVML-FUNCTION\n"
	"       gpusim fault driver-unload|driver-load\n"
	"       gpusim fault checkpoint-fails PID          (its next checkpoint; it is in state FAILED then)\n"
	"       gpusim fault mig GPU PROFILES|off          (3g.40gb,2g.20gb; '': in MIG mode, nothing made)\n"
	"The server is found by $GPUSIM_DIR (default " GPUSIM_DEFAULT_DIR ").\n";

int cli_connect(const char *dir, uint32_t kind)
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	struct hello hello = {.magic = GPUSIM_MAGIC, .version = GPUSIM_VERSION, .kind = kind};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if ((size_t)snprintf(address.sun_path, sizeof(address.sun_path), "%s/" GPUSIM_SOCKET, dir) >=
	    sizeof(address.sun_path)) {
		fprintf(stderr, "gpusim: the path %s is too long for a socket\n", dir);
		exit(1);
	}
	if (connect(fd, (struct sockaddr *)&address, sizeof(address)) < 0 ||
	    write(fd, &hello, sizeof(hello)) != sizeof(hello)) {
		fprintf(stderr, "gpusim: no server at %s: %s\n", address.sun_path, strerror(errno));
		exit(1);
	}
	return fd;
}

static void read_all(int fd, void *data, size_t bytes)
{
	char *to = data;

	while (bytes) {
		ssize_t got = read(fd, to, bytes);

		if (got <= 0) {
			fprintf(stderr, "gpusim: the server ended\n");
			exit(1);
		}
		to += got;
		bytes -= (size_t)got;
	}
}

static void *ask(int fd, const struct query *query, struct answer *answer)
{
	void *items;

	if (write(fd, query, sizeof(*query)) != sizeof(*query)) {
		fprintf(stderr, "gpusim: the server ended\n");
		exit(1);
	}
	read_all(fd, answer, sizeof(*answer));
	items = malloc((size_t)answer->count * answer->item_bytes + 1);
	if (!items)
		abort();
	read_all(fd, items, (size_t)answer->count * answer->item_bytes);
	if (answer->status) {
		fprintf(stderr, "gpusim: refused: %s\n", strerror((int)answer->status));
		exit(1);
	}
	return items;
}

static int truth(int fd)
{
	struct answer answer;
	struct truth_entry *all = ask(fd, &(struct query){.op = Q_TRUTH}, &answer);

	for (uint32_t i = 0; i < answer.count; i++) {
		const struct truth_entry *t = &all[i];

		printf("{\"pid\": %u, \"device\": %u, \"alive\": %s, \"mps\": %s, \"launches\": %lu, \"kernels\": %lu, "
		       "\"allocations\": %lu, \"sm_ns\": %lu, \"busy_ns\": %lu, \"tx_bytes\": %lu, \"rx_bytes\": %lu, "
		       "\"memory_bytes\": %lu, \"peer_tx_bytes\": %lu, \"peer_rx_bytes\": %lu, \"queued_ns\": %lu, "
		       "\"queued_max_ns\": %lu}\n",
		       t->pid, t->device, t->alive ? "true" : "false", t->mps ? "true" : "false", t->launches,
		       t->kernels, t->allocations, t->sm_ns, t->busy_ns, t->tx_bytes, t->rx_bytes, t->memory_bytes,
		       t->peer_tx_bytes, t->peer_rx_bytes, t->queued_ns, t->queued_max_ns);
	}
	free(all);
	return 0;
}

static int status(int fd)
{
	struct answer answer, one;
	struct device_facts *facts = ask(fd, &(struct query){.op = Q_DEVICES}, &answer);

	for (uint32_t d = 0; d < answer.count; d++) {
		struct device_state *s;

		if (!facts[d].present)
			continue;
		s = ask(fd, &(struct query){.op = Q_DEVICE_STATE, .device = d}, &one);
		printf("{\"device\": %u, \"gpu\": %u, \"uuid\": \"%s\", \"sms\": %u, \"at_ns\": %lu, \"sm_active_ns\": "
		       "%lu, "
		       "\"busy_ns\": %lu, "
		       "\"tx_bytes\": %lu, \"rx_bytes\": %lu, \"memory_used\": %lu, \"memory_bytes\": %lu, \"lost\": "
		       "%s, "
		       "\"mps\": %s}\n",
		       d, facts[d].gpu, facts[d].uuid, facts[d].sms, s->at_ns, s->sm_active_ns, s->busy_ns, s->tx_bytes,
		       s->rx_bytes, s->memory_used, facts[d].memory_bytes, s->lost ? "true" : "false",
		       s->mps ? "true" : "false");
		free(s);
	}
	free(facts);
	return 0;
}

static int fault(int fd, int argc, char **argv)
{
	struct query query = {.op = Q_FAULT};
	struct answer answer;

	snprintf(query.text, sizeof(query.text), "%s", argv[0]);
	if (strcmp(argv[0], "drop-samples") == 0 || strcmp(argv[0], "checkpoint-fails") == 0) {
		query.a = strtoull(argv[1], NULL, 10);
	} else if (strcmp(argv[0], "unsupported") == 0 || strcmp(argv[0], "supported") == 0) {
		snprintf(query.name, sizeof(query.name), "%s", argv[1]);
	} else {
		query.device = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 0;
		if (strcmp(argv[0], "mig") == 0 && argc > 2)
			snprintf(query.name, sizeof(query.name), "%s", argv[2]);
		query.a = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
		query.b = argc > 3 ? strtoull(argv[3], NULL, 10) : 0;
	}
	free(ask(fd, &query, &answer));
	return 0;
}

int cli(int argc, char **argv)
{
	const char *dir = getenv("GPUSIM_DIR") ? getenv("GPUSIM_DIR") : GPUSIM_DEFAULT_DIR;

	if (argc == 2 && strcmp(argv[1], "truth") == 0)
		return truth(cli_connect(dir, HELLO_QUERY));
	if (argc == 2 && strcmp(argv[1], "status") == 0)
		return status(cli_connect(dir, HELLO_QUERY));
	if (argc >= (argc > 2 && strncmp(argv[2], "driver-", 7) == 0 ? 3 : 4) && strcmp(argv[1], "fault") == 0)
		return fault(cli_connect(dir, HELLO_QUERY), argc - 2, argv + 2);
	fputs(USAGE, stderr);
	return 2;
}
