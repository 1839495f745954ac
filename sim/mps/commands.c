/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "commands.h"

#include <ctype.h>
#include <stdarg.h>
#include <time.h>

#include "../query.h"
#include "pipes.h"

enum {
	MOST_WORDS = 8,
	SHORT_UUID = 22, /* what `ps` shows of one */
};

struct words {
	int count;
	char *word[MOST_WORDS];
};

struct verb {
	const char *name;
	bool (*run)(int server, const struct words *words);
	int least, most; /* words after the name */
	const char *usage;
};

static bool has_quit;

__attribute__((format(printf, 1, 2))) static bool refuse(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	putchar('\n');
	return false;
}

/* ---- asking ---- */

static bool ask(int server, struct query *query, void **items, unsigned *count)
{
	struct answer answer;

	if (!query_ask(server, query, &answer, items))
		return refuse("Connection to the GPU lost");
	*count = answer.count;
	if (answer.status == 0)
		return true;
	free(*items);
	*items = NULL;
	return refuse("Failed: %s", strerror((int)answer.status));
}

static bool get_status(int server, struct mps_status *status)
{
	struct query query = {.op = Q_MPS_STATUS};
	unsigned count;
	void *items;

	if (!ask(server, &query, &items, &count))
		return false;
	if (count == 1)
		memcpy(status, items, sizeof(*status));
	free(items);
	return count == 1 || refuse("Connection to the GPU lost");
}

static bool get_clients(int server, struct mps_client **clients, unsigned *count)
{
	struct query query = {.op = Q_MPS_CLIENTS};
	void *items;

	if (!ask(server, &query, &items, count))
		return false;
	*clients = items;
	return true;
}

static bool get_devices(int server, struct device_facts **facts, unsigned *count)
{
	struct query query = {.op = Q_DEVICES};
	void *items;

	if (!ask(server, &query, &items, count))
		return false;
	*facts = items;
	return true;
}

static bool set(int server, const char *what, unsigned device, uint64_t value)
{
	struct query query = {.op = Q_MPS_SET, .device = device, .a = value};
	unsigned count;
	void *items;

	snprintf(query.text, sizeof(query.text), "%s", what);
	if (!ask(server, &query, &items, &count))
		return false;
	free(items);
	return true;
}

/* ---- reading words ---- */

static bool read_number(const char *text, uint64_t *value)
{
	char *end;

	errno = 0;
	*value = strtoull(text, &end, 10);
	return (isdigit((unsigned char)*text) && !*end && !errno) || refuse("Invalid argument: %s", text);
}

/* Fractions are taken, as by the real one; a client's limit is rounded up to whole percents. */
static bool read_percentage(const char *text, uint64_t *value)
{
	char *end;
	double percentage = strtod(text, &end);

	if (end == text || *end || !(percentage > 0 && percentage <= 100))
		return refuse("Invalid active thread percentage: %s", text);
	*value = (uint64_t)percentage + (percentage > (double)(uint64_t)percentage);
	return true;
}

/* "512M", "2G", or plain bytes; 0 lifts the limit. */
static bool read_limit(const char *text, uint64_t *bytes)
{
	char *end;
	unsigned long long value = strtoull(text, &end, 10);

	if (isdigit((unsigned char)*text) && strlen(end) <= 1) {
		switch (toupper((unsigned char)*end)) {
		case '\0':
			*bytes = value;
			return true;
		case 'M':
			*bytes = value << 20;
			return true;
		case 'G':
			*bytes = value << 30;
			return true;
		}
	}
	return refuse("Invalid memory limit: %s", text);
}

static bool read_device(int server, const char *text, unsigned *device)
{
	struct device_facts *facts;
	unsigned count;
	uint64_t index = UINT64_MAX;

	if (!get_devices(server, &facts, &count))
		return false;
	for (unsigned at = 0; at < count; at++)
		if (!strcmp(text, facts[at].uuid))
			index = at;
	free(facts);
	if (index == UINT64_MAX && !read_number(text, &index))
		return false;
	*device = (unsigned)index;
	return index < count || refuse("Invalid device: %s", text);
}

static bool read_server(int server, const char *text, struct mps_status *status)
{
	uint64_t pid;

	if (!read_number(text, &pid) || !get_status(server, status))
		return false;
	return (status->running && pid == status->server_pid) || refuse("Server %s not found", text);
}

/* ---- servers and clients ---- */

static bool get_server_list(int server, const struct words *words)
{
	struct mps_status status;

	(void)words;
	if (!get_status(server, &status))
		return false;
	if (status.running)
		printf("%u\n", status.server_pid);
	return true;
}

static bool get_server_status(int server, const struct words *words)
{
	struct mps_status status;

	if (!read_server(server, words->word[1], &status))
		return false;
	puts("ACTIVE");
	return true;
}

/* There is one server for every user, and it runs as long as the daemon. */
static bool start_server(int server, const struct words *words)
{
	uint64_t uid;

	(void)server;
	if (strcmp(words->word[1], "-uid") != 0)
		return refuse("Usage: start_server -uid <user id>");
	return read_number(words->word[2], &uid);
}

static bool already_listed(const struct mps_client *clients, unsigned at)
{
	for (unsigned before = 0; before < at; before++)
		if (clients[before].pid == clients[at].pid)
			return true;
	return false;
}

static bool get_client_list(int server, const struct words *words)
{
	struct mps_status status;
	struct mps_client *clients;
	unsigned count;

	if (!read_server(server, words->word[1], &status) || !get_clients(server, &clients, &count))
		return false;
	for (unsigned at = 0; at < count; at++)
		if (!already_listed(clients, at))
			printf("%u\n", clients[at].pid);
	free(clients);
	return true;
}

static bool get_device_client_list(int server, const struct words *words)
{
	struct mps_status status;
	struct mps_client *clients;
	struct device_facts *facts;
	unsigned client_count, device_count;

	if (words->count > 1 && !read_server(server, words->word[1], &status))
		return false;
	if (!get_devices(server, &facts, &device_count))
		return false;
	if (!get_clients(server, &clients, &client_count)) {
		free(facts);
		return false;
	}
	for (unsigned device = 0; device < device_count; device++) {
		printf("Device %s\n", facts[device].uuid);
		for (unsigned at = 0; at < client_count; at++)
			if (clients[at].device == device)
				printf("%u\n", clients[at].pid);
	}
	free(clients);
	free(facts);
	return true;
}

static void read_command_line(unsigned pid, char *text, size_t length)
{
	char path[64];
	FILE *file;
	size_t got = 0;

	snprintf(path, sizeof(path), "/proc/%u/cmdline", pid);
	file = fopen(path, "re");
	if (file) {
		got = fread(text, 1, length - 1, file);
		fclose(file);
	}
	text[got] = '\0';
	for (size_t at = 0; at + 1 < got; at++)
		if (!text[at])
			text[at] = ' ';
}

static unsigned long pid_namespace(unsigned pid)
{
	char path[64], target[64] = "";
	unsigned long inode = 0;

	snprintf(path, sizeof(path), "/proc/%u/ns/pid", pid);
	if (readlink(path, target, sizeof(target) - 1) > 0)
		sscanf(target, "pid:[%lu]", &inode);
	return inode;
}

static void print_client(const struct mps_client *client, const struct device_facts *facts, unsigned server_pid)
{
	char command[256];

	read_command_line(client->pid, command, sizeof(command));
	printf("%-9u %-7u %-9u %-*.*s %-14lu %s\n", client->pid, client->id, server_pid, SHORT_UUID, SHORT_UUID,
	       facts[client->device].uuid, pid_namespace(client->pid), command);
}

static bool ps(int server, const struct words *words)
{
	struct mps_status status;
	struct mps_client *clients;
	struct device_facts *facts;
	unsigned client_count, device_count;
	uint64_t pid = 0;

	if (words->count > 1 && (words->count != 3 || strcmp(words->word[1], "-p") != 0))
		return refuse("Usage: ps [-p <PID>]");
	if (words->count == 3 && !read_number(words->word[2], &pid))
		return false;
	if (!get_status(server, &status) || !get_devices(server, &facts, &device_count))
		return false;
	if (!get_clients(server, &clients, &client_count)) {
		free(facts);
		return false;
	}
	printf("%-9s %-7s %-9s %-*s %-14s %s\n", "PID", "ID", "SERVER", SHORT_UUID, "DEVICE", "NAMESPACE", "COMMAND");
	for (unsigned at = 0; at < client_count; at++)
		if (clients[at].device < device_count && (!pid || pid == clients[at].pid))
			print_client(&clients[at], facts, status.server_pid);
	free(clients);
	free(facts);
	return true;
}

static bool terminate_id(int server, unsigned id)
{
	struct query query = {.op = Q_MPS_TERMINATE, .a = id};
	unsigned count;
	void *items;

	if (!ask(server, &query, &items, &count))
		return false;
	free(items);
	return true;
}

static bool terminate_client(int server, const struct words *words)
{
	struct mps_status status;
	struct mps_client *clients;
	unsigned count, found = 0;
	uint64_t pid;
	bool done = true;

	if (!read_server(server, words->word[1], &status) || !read_number(words->word[2], &pid) ||
	    !get_clients(server, &clients, &count))
		return false;
	for (unsigned at = 0; at < count; at++) {
		/* A process that uses several devices is listed once for each. */
		if (clients[at].pid != pid || already_listed(clients, at))
			continue;
		found++;
		done = terminate_id(server, clients[at].id) && done;
	}
	free(clients);
	return found ? done : refuse("Client %s not found", words->word[2]);
}

/* ---- limits ---- */

static bool get_default_percentage(int server, const struct words *words)
{
	struct mps_status status;

	(void)words;
	if (!get_status(server, &status))
		return false;
	printf("%.1f\n", (double)status.default_percentage);
	return true;
}

static bool set_default_percentage(int server, const struct words *words)
{
	uint64_t percentage;

	return read_percentage(words->word[1], &percentage) && set(server, "default-percentage", 0, percentage) &&
	       get_default_percentage(server, words);
}

static bool get_percentage(int server, const struct words *words)
{
	struct mps_status status;

	if (!read_server(server, words->word[1], &status))
		return false;
	printf("%.1f\n", (double)status.percentage);
	return true;
}

static bool set_percentage(int server, const struct words *words)
{
	struct mps_status status;
	uint64_t percentage;

	return read_server(server, words->word[1], &status) && read_percentage(words->word[2], &percentage) &&
	       set(server, "percentage", 0, percentage) && get_percentage(server, words);
}

static bool print_limit(uint64_t bytes)
{
	if (bytes)
		printf("%luM\n", (bytes + (1 << 20) - 1) >> 20);
	else
		puts("unlimited");
	return true;
}

static bool get_default_memory(int server, const struct words *words)
{
	struct mps_status status;
	unsigned device;

	return read_device(server, words->word[1], &device) && get_status(server, &status) &&
	       print_limit(status.default_memory[device]);
}

static bool set_default_memory(int server, const struct words *words)
{
	unsigned device;
	uint64_t bytes;

	return read_device(server, words->word[1], &device) && read_limit(words->word[2], &bytes) &&
	       set(server, "default-memory", device, bytes);
}

static bool get_memory(int server, const struct words *words)
{
	struct mps_status status;
	unsigned device;

	return read_server(server, words->word[1], &status) && read_device(server, words->word[2], &device) &&
	       print_limit(status.memory[device]);
}

static bool set_memory(int server, const struct words *words)
{
	struct mps_status status;
	unsigned device;
	uint64_t bytes;

	return read_server(server, words->word[1], &status) && read_device(server, words->word[2], &device) &&
	       read_limit(words->word[3], &bytes) && set(server, "memory", device, bytes);
}

static bool get_default_priority(int server, const struct words *words)
{
	struct mps_status status;

	(void)words;
	if (!get_status(server, &status))
		return false;
	printf("%d\n", status.default_priority);
	return true;
}

static bool set_default_priority(int server, const struct words *words)
{
	uint64_t priority;

	if (!read_number(words->word[1], &priority))
		return false;
	if (priority > 1)
		return refuse("Invalid client priority: %s", words->word[1]);
	return set(server, "default-priority", 0, priority);
}

/* ---- the rest ---- */

static bool device_query(int server, const struct words *words)
{
	struct device_facts *facts;
	unsigned count;

	(void)words;
	if (!get_devices(server, &facts, &count))
		return false;
	printf("%-16s %-20s %-42s %s\n", "Device Ordinal", "PCI IDs", "UUID", "Name");
	for (unsigned at = 0; at < count; at++)
		printf("%-16u %-20s %-42s %s\n", facts[at].index, facts[at].pci_bus_id, facts[at].uuid, facts[at].name);
	free(facts);
	return true;
}

static void pause_a_little(void)
{
	struct timespec pause = {.tv_nsec = 20000000};

	nanosleep(&pause, NULL);
}

static bool terminate_all(int server)
{
	struct mps_client *clients;
	unsigned count;
	bool done = true;

	if (!get_clients(server, &clients, &count))
		return false;
	for (unsigned at = 0; at < count; at++)
		if (!already_listed(clients, at))
			done = terminate_id(server, clients[at].id) && done;
	free(clients);
	return done;
}

/* Without a limit it waits for every client to leave, as the real one does. */
static bool wait_for_clients(int server, bool limited, uint64_t limit_s)
{
	time_t deadline = time(NULL) + (time_t)limit_s;
	struct mps_status status;

	for (;;) {
		if (!get_status(server, &status))
			return false;
		if (!status.running || !status.clients)
			return true;
		if (limited && time(NULL) >= deadline)
			return terminate_all(server);
		pause_a_little();
	}
}

static bool quit(int server, const struct words *words)
{
	uint64_t limit_s = 0;
	int pipe;

	if (words->count > 1 && (words->count != 3 || strcmp(words->word[1], "-t") != 0))
		return refuse("Usage: quit [-t TIMEOUT]");
	if (words->count == 3 && !read_number(words->word[2], &limit_s))
		return false;
	if (!wait_for_clients(server, words->count == 3, limit_s))
		return false;
	pipe = pipe_open();
	if (pipe < 0 || write(pipe, "quit\n", 5) != 5)
		return refuse("Cannot find MPS control daemon process");
	close(pipe);
	while ((pipe = pipe_open()) >= 0) { /* so that whoever starts a daemon next does not meet this one */
		close(pipe);
		pause_a_little();
	}
	has_quit = true;
	return true;
}

static const struct verb VERBS[] = {
	{"get_server_list", get_server_list, 0, 0, ""},
	{"get_server_status", get_server_status, 1, 1, "<PID>"},
	{"start_server", start_server, 2, 2, "-uid <user id>"},
	{"get_client_list", get_client_list, 1, 1, "<PID>"},
	{"get_device_client_list", get_device_client_list, 0, 1, "[<PID>]"},
	{"ps", ps, 0, 2, "[-p <PID>]"},
	{"terminate_client", terminate_client, 2, 2, "<server PID> <client PID>"},
	{"get_default_active_thread_percentage", get_default_percentage, 0, 0, ""},
	{"set_default_active_thread_percentage", set_default_percentage, 1, 1, "<percentage>"},
	{"get_active_thread_percentage", get_percentage, 1, 1, "<PID>"},
	{"set_active_thread_percentage", set_percentage, 2, 2, "<PID> <percentage>"},
	{"get_default_device_pinned_mem_limit", get_default_memory, 1, 1, "<device>"},
	{"set_default_device_pinned_mem_limit", set_default_memory, 2, 2, "<device> <limit>"},
	{"get_device_pinned_mem_limit", get_memory, 2, 2, "<PID> <device>"},
	{"set_device_pinned_mem_limit", set_memory, 3, 3, "<PID> <device> <limit>"},
	{"get_default_client_priority", get_default_priority, 0, 0, ""},
	{"set_default_client_priority", set_default_priority, 1, 1, "<priority>"},
	{"device_query", device_query, 0, 0, ""},
	{"quit", quit, 0, 2, "[-t TIMEOUT]"},
};

static bool help(void)
{
	puts("Available commands:");
	for (size_t at = 0; at < sizeof(VERBS) / sizeof(*VERBS); at++)
		printf("  %s %s\n", VERBS[at].name, VERBS[at].usage);
	return true;
}

bool command_run(int server, char *line)
{
	struct words words = {0};
	char *rest = line, *word;

	while (words.count < MOST_WORDS && (word = strtok_r(rest, " \t\r\n", &rest)))
		words.word[words.count++] = word;
	if (!words.count)
		return true;
	if (!strcmp(words.word[0], "help"))
		return help();
	for (size_t at = 0; at < sizeof(VERBS) / sizeof(*VERBS); at++) {
		const struct verb *verb = &VERBS[at];

		if (strcmp(words.word[0], verb->name) != 0)
			continue;
		if (words.count - 1 < verb->least || words.count - 1 > verb->most)
			return refuse("Usage: %s %s", verb->name, verb->usage);
		return verb->run(server, &words);
	}
	return refuse("Unknown command: %s", words.word[0]);
}

bool command_quit(void)
{
	return has_quit;
}
