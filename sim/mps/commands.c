/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "commands.h"

#include <time.h>

#include "pipes.h"
#include "state.h"

enum {
	LONGEST_NAME = 64,
	SHORT_UUID = 22, /* what `ps` shows of one */
};

struct verb {
	const char *name;
	void (*run)(int server, const char *words); /* what follows the name */
	int since; /* the first release that has it */
};

static bool has_quit;

/* ---- servers and clients ---- */

static void get_server_list(int server, const char *words)
{
	struct mps_status status;

	(void)words;
	if (get_status(server, &status) && status.started)
		say("%u", status.server_pid);
}

static void get_server_status(int server, const char *words)
{
	struct mps_status status;
	int pid;

	if (sscanf(words, "%d", &pid) != 1)
		say("A server PID is required");
	else if (!get_status(server, &status))
		return;
	else if (!status.started || pid != (int)status.server_pid)
		say("Server %d not found", pid);
	else
		say(is_ready(&status) ? "ACTIVE" : "INITIALIZING");
}

/* There is one server for every user. */
static void start_server(int server, const char *words)
{
	char option[8];
	unsigned uid;

	if (sscanf(words, "%7s %u", option, &uid) != 2 || strcmp(option, "-uid") != 0)
		say("A user id (UID) is required to start a new server");
	else if (geteuid() != 0 && geteuid() != uid && release() < 550)
		say("Insufficient privileges for UID %u", geteuid());
	else if (geteuid() != 0 && geteuid() != uid)
		say("Insufficient privileges for UID %u. Only the root user may start server for another user.",
		    geteuid());
	else
		set(server, "server", 0, 1);
}

static bool already_listed(const struct mps_client *clients, unsigned at)
{
	for (unsigned before = 0; before < at; before++)
		if (clients[before].pid == clients[at].pid)
			return true;
	return false;
}

static void get_client_list(int server, const char *words)
{
	struct mps_status status;
	struct mps_client *clients;
	unsigned count;

	if (!server_ready(server, (int)strtol(words, NULL, 10), &status) || !get_clients(server, &clients, &count))
		return;
	for (unsigned at = 0; at < count; at++)
		if (!already_listed(clients, at))
			say("%u", clients[at].pid);
	free(clients);
}

/* A line for each device, "[0] 01:00.0, NVIDIA …", and one for each client there: its pid and number. */
static void list_by_device(const struct device_facts *facts, unsigned devices, const struct mps_client *clients,
			   unsigned count)
{
	for (unsigned device = 0; device < devices; device++) {
		unsigned domain = 0, bus = 0, slot = 0;

		sscanf(facts[device].pci_bus_id, "%x:%x:%x", &domain, &bus, &slot);
		say("[%u] %02u:%02u.0, %s", device, bus, slot, facts[device].name);
		for (unsigned at = 0; at < count; at++)
			if (clients[at].device == device)
				say("%u.%u", clients[at].pid, clients[at].id);
	}
}

static void get_device_client_list(int server, const char *words)
{
	struct mps_status status;
	struct mps_client *clients;
	struct device_facts *facts;
	unsigned client_count, device_count;
	int pid;

	if (sscanf(words, "%d", &pid) == 1 ? !server_ready(server, pid, &status)
					   : !get_status(server, &status) || !is_ready(&status))
		return;
	if (!get_devices(server, &facts, &device_count))
		return;
	if (get_clients(server, &clients, &client_count)) {
		list_by_device(facts, device_count, clients, client_count);
		free(clients);
	}
	free(facts);
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

/* `-p` selects a server. */
static void ps(int server, const char *words)
{
	struct mps_status status;
	struct mps_client *clients;
	struct device_facts *facts;
	unsigned client_count, device_count;
	char option[4] = "";
	int pid = 0;

	sscanf(words, "%3s %d", option, &pid);
	if (!get_status(server, &status))
		return;
	if (strcmp(option, "-p") == 0 && (!status.started || pid != (int)status.server_pid)) {
		say("Server %d not found\nServer %d not found\n", pid, pid);
		return;
	}
	if (!is_ready(&status)) {
		say("Server not found");
		return;
	}
	if (!get_devices(server, &facts, &device_count))
		return;
	if (get_clients(server, &clients, &client_count)) {
		say("%-9s %-7s %-9s %-*s %-14s %s", "PID", "ID", "SERVER", SHORT_UUID, "DEVICE", "NAMESPACE",
		    "COMMAND");
		for (unsigned at = 0; at < client_count; at++)
			if (clients[at].device < device_count)
				print_client(&clients[at], facts, status.server_pid);
		free(clients);
	}
	free(facts);
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

static bool terminate_pid(int server, unsigned pid)
{
	struct mps_client *clients;
	unsigned count, found = 0;
	bool done = true;

	if (!get_clients(server, &clients, &count))
		return false;
	for (unsigned at = 0; at < count; at++) {
		/* A process that uses several devices is listed once for each. */
		if (clients[at].pid != pid || already_listed(clients, at))
			continue;
		found++;
		done = terminate_id(server, clients[at].id) && done;
	}
	free(clients);
	return found ? done : say("Invalid process %u!", pid);
}

/* The last line is 0 when it is done. */
static void terminate_client(int server, const char *words)
{
	struct mps_status status;
	int server_pid = 0, pid = 0;

	sscanf(words, "%d %d", &server_pid, &pid);
	if (!server_ready(server, server_pid, &status)) {
		say("Server %d not found!\n1", server_pid);
		return;
	}
	if (release() >= 550 && !privileged()) {
		say("Insufficient privileges for UID %u. Only the root user may terminate clients on another user's "
		    "server.\n1",
		    geteuid());
		return;
	}
	say(terminate_pid(server, (unsigned)pid) ? "0" : "1");
}

/* With clients only when it is forced. */
static void shutdown_server(int server, const char *words)
{
	struct mps_status status;
	char option[4] = "";
	int pid = 0;
	bool forced;

	sscanf(words, "%d %3s", &pid, option);
	if (!server_ready(server, pid, &status))
		return;
	forced = strcmp(option, "-f") == 0;
	if (status.clients && forced)
		terminate_all(server);
	if (!status.clients || forced)
		set(server, "server", 0, 0);
}

/* ---- the rest ---- */

static void device_query(int server, const char *words)
{
	struct device_facts *facts;
	unsigned count;

	(void)words;
	if (!get_devices(server, &facts, &count))
		return;
	say("%-16s %-20s %-42s %s", "Device Ordinal", "PCI IDs", "UUID", "Name");
	for (unsigned at = 0; at < count; at++)
		say("%-16u %-20s %-42s %s", facts[at].index, facts[at].pci_bus_id, facts[at].uuid, facts[at].name);
	free(facts);
}

static void pause_a_little(void)
{
	struct timespec pause = {.tv_nsec = 20000000};

	nanosleep(&pause, NULL);
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

static void quit(int server, const char *words)
{
	char option[4] = "";
	int pipe, limit_s = 0;
	bool limited;

	sscanf(words, "%3s %d", option, &limit_s);
	limited = strcmp(option, "-t") == 0;
	if (!privileged()) {
		say("Not enough privilege to execute quit command");
		return;
	}
	if (!wait_for_clients(server, limited, limit_s > 0 ? (uint64_t)limit_s : 0))
		return;
	pipe = pipe_open();
	if (pipe < 0 || write(pipe, "quit\n", 5) != 5) {
		say("Cannot find MPS control daemon process");
		return;
	}
	close(pipe);
	while ((pipe = pipe_open()) >= 0) { /* so that a daemon that is started next does not meet this one */
		close(pipe);
		pause_a_little();
	}
	has_quit = true;
}

static const struct verb VERBS[] = {
	{"get_server_list", get_server_list, 0},
	{"get_server_status", get_server_status, 550},
	{"start_server", start_server, 0},
	{"shutdown_server", shutdown_server, 0},
	{"get_client_list", get_client_list, 0},
	{"get_device_client_list", get_device_client_list, 0},
	{"ps", ps, 0},
	{"terminate_client", terminate_client, 0},
	{"get_default_active_thread_percentage", get_default_percentage, 0},
	{"set_default_active_thread_percentage", set_default_percentage, 0},
	{"get_active_thread_percentage", get_percentage, 0},
	{"set_active_thread_percentage", set_percentage, 0},
	{"get_default_device_pinned_mem_limit", get_default_memory, 0},
	{"set_default_device_pinned_mem_limit", set_default_memory, 0},
	{"get_device_pinned_mem_limit", get_memory, 0},
	{"set_device_pinned_mem_limit", set_memory, 0},
	{"get_default_client_priority", get_default_priority, 0},
	{"set_default_client_priority", set_default_priority, 0},
	{"device_query", device_query, 580},
	{"quit", quit, 0},
};

void command_run(int server, const char *line)
{
	char name[LONGEST_NAME] = "";
	int length = 0;

	sscanf(line, "%63s%n", name, &length);
	for (size_t at = 0; at < sizeof(VERBS) / sizeof(*VERBS); at++)
		if (!strcmp(name, VERBS[at].name) && release() >= VERBS[at].since) {
			VERBS[at].run(server, line + length);
			return;
		}
	say("Unknown command \"%s\"", name);
}

bool command_quit(void)
{
	return has_quit;
}
