/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * One process locks, saves, restores and unlocks another: RUNNING → LOCKED → CHECKPOINTED → LOCKED → RUNNING.
 *
 * A transition belongs to the process that it changes: it goes on when the one who asked for it is gone, and the next
 * one waits for its end. The process has to take part, as its restore thread does on a GPU: while it is stopped or
 * frozen nothing moves, and a lock does not give up either, whatever its limit; only among work that goes on it does. Who
 * asks for the state meanwhile hears that it is locked. A process whose restore found no room stays saved for ever, as with
 * the driver 580.159.04.
 */
#include <errno.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

#include "server.h"

#define POLL_NS 2000000ull
#define UNLOCK_NS 1800000ull
#define NS_PER_MS 1000000ull

enum { /* CUresult */
       SUCCESS = 0,
       INVALID_VALUE = 1,
       OUT_OF_MEMORY = 2,
       NOT_INITIALIZED = 3,
       OPERATING_SYSTEM = 304,
       ILLEGAL_STATE = 401,
       NOT_READY = 600,
       NOT_PERMITTED = 800,
       NOT_SUPPORTED = 801,
       UNKNOWN = 999,
};

/* ---- whether the process can take part ---- */

static bool file_has(const char *path, const char *wanted)
{
	char text[256];
	FILE *file = fopen(path, "re");
	size_t length;

	if (!file)
		return false;
	length = fread(text, 1, sizeof(text) - 1, file);
	fclose(file);
	text[length] = 0;
	return strstr(text, wanted) != NULL;
}

static bool stopped(uint32_t pid)
{
	char path[64], text[512];
	const char *state;
	FILE *file;
	size_t length;

	snprintf(path, sizeof(path), "/proc/%u/stat", pid);
	file = fopen(path, "re");
	if (!file)
		return false;
	length = fread(text, 1, sizeof(text) - 1, file);
	fclose(file);
	text[length] = 0;
	state = strrchr(text, ')');
	return state && state[1] == ' ' && (state[2] == 'T' || state[2] == 't');
}

static bool frozen_below(const char *line)
{
	char path[PATH_MAX + 64];
	const char *group = strrchr(line, ':');

	if (!group)
		return false;
	group++;
	if (strstr(line, ":freezer:")) {
		snprintf(path, sizeof(path), "/sys/fs/cgroup/freezer%s/freezer.state", group);
		return file_has(path, "FROZEN") || file_has(path, "FREEZING");
	}
	if (strncmp(line, "0::", 3) != 0)
		return false;
	snprintf(path, sizeof(path), "/sys/fs/cgroup%s/cgroup.events", group);
	if (file_has(path, "frozen 1"))
		return true;
	snprintf(path, sizeof(path), "/sys/fs/cgroup/unified%s/cgroup.events", group);
	return file_has(path, "frozen 1");
}

static bool frozen(uint32_t pid)
{
	char path[64], line[PATH_MAX];
	bool found = false;
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%u/cgroup", pid);
	file = fopen(path, "re");
	while (file && !found && fgets(line, sizeof(line), file)) {
		line[strcspn(line, "\n")] = 0;
		found = frozen_below(line);
	}
	if (file)
		fclose(file);
	return found;
}

static bool takes_part(const struct client *target)
{
	return !stopped(target->pid) && !frozen(target->pid);
}

/* ---- its memory ---- */

static uint64_t bytes_on(const struct node *node, const struct client *target, unsigned device)
{
	uint64_t bytes = target->contexts[device] ? node->config.context_bytes : 0;

	for (size_t i = 0; i < target->allocation_count; i++)
		if (target->allocations[i].device == device)
			bytes += target->allocations[i].bytes;
	return bytes;
}

static void leave_devices(struct node *node, struct client *target)
{
	for (unsigned d = 0; d < device_count(node->model); d++) {
		uint64_t bytes = bytes_on(node, target, d);

		memory_give(node->model, d, bytes);
		if (target->records[d])
			target->records[d]->truth.memory_bytes -= bytes;
	}
	target->swapped = true;
}

/* All or nothing. */
static bool return_to_devices(struct node *node, struct client *target)
{
	unsigned devices = device_count(node->model), d;

	for (d = 0; d < devices; d++)
		if (!memory_take(node->model, d, bytes_on(node, target, d)))
			break;
	if (d < devices) {
		while (d-- > 0)
			memory_give(node->model, d, bytes_on(node, target, d));
		return false;
	}
	for (d = 0; d < devices; d++)
		if (target->records[d])
			target->records[d]->truth.memory_bytes += bytes_on(node, target, d);
	target->swapped = false;
	return true;
}

static bool shares_memory(const struct client *target)
{
	for (size_t i = 0; i < target->allocation_count; i++)
		if (target->allocations[i].exported)
			return true;
	return target->opened > 0;
}

/* ---- answers ---- */

static void answer(struct node *node, struct client *caller, int result, uint32_t value)
{
	struct checkpoint_reply reply = {.result = result, .value = value};

	caller->question = (struct question){0};
	query_reply(caller, 0, &reply, 1, sizeof(reply));
	client_send(node, caller);
}

static void finish(struct node *node, struct client *target, int result)
{
	uint32_t caller = target->transition.caller;

	target->transition = (struct transition){0};
	for (struct client *client = node->clients; client; client = client->next)
		if (client->id == caller && client->question.begun && !client->doomed)
			answer(node, client, result, 0);
}

static void set_locked(struct client *target, bool locked)
{
	atomic_store(&target->shared->locked, locked);
	target->dirty = true; /* who waits looks again */
}

/* ---- transitions ---- */

static bool drained(const struct node *node, const struct client *target)
{
	const struct shared *shared = target->shared;

	if (atomic_load(&shared->calls) || atomic_load(&shared->host_calls))
		return false;
	if (atomic_load(&shared->head) != target->tail)
		return false;
	for (unsigned d = 0; d < device_count(node->model); d++)
		if (target->contexts[d] && context_queued(target->contexts[d]))
			return false;
	return true;
}

static void go_on_locking(struct node *node, struct client *target, uint64_t now_ns)
{
	if (!takes_part(target))
		return;
	if (drained(node, target)) {
		target->state = STATE_LOCKED;
		finish(node, target, SUCCESS);
	} else if (now_ns >= target->transition.deadline_ns) {
		set_locked(target, false);
		finish(node, target, NOT_READY);
	}
}

static void end_saving(struct node *node, struct client *target)
{
	if (target->checkpoint_fails) {
		target->state = STATE_FAILED;
		finish(node, target, UNKNOWN);
		return;
	}
	leave_devices(node, target);
	target->state = STATE_CHECKPOINTED;
	finish(node, target, SUCCESS);
}

static void go_on(struct node *node, struct client *target, uint64_t now_ns)
{
	enum checkpoint_op op = target->transition.op;

	if (op == CHECKPOINT_LOCK) {
		go_on_locking(node, target, now_ns);
		return;
	}
	if (now_ns < target->transition.done_ns || !takes_part(target))
		return;
	if (op == CHECKPOINT_SAVE) {
		end_saving(node, target);
		return;
	}
	if (op == CHECKPOINT_UNLOCK)
		set_locked(target, false);
	target->state = op == CHECKPOINT_UNLOCK ? STATE_RUNNING : STATE_LOCKED;
	finish(node, target, SUCCESS);
}

/* What stands against it; SUCCESS: it can begin. */
static int objection(const struct client *target, enum checkpoint_op op)
{
	static const enum checkpoint_state wanted[] = {[CHECKPOINT_LOCK] = STATE_RUNNING,
						       [CHECKPOINT_SAVE] = STATE_LOCKED,
						       [CHECKPOINT_RESTORE] = STATE_CHECKPOINTED,
						       [CHECKPOINT_UNLOCK] = STATE_LOCKED};

	if (target->mps)
		return NOT_SUPPORTED;
	if (target->state != wanted[op])
		return ILLEGAL_STATE;
	return op == CHECKPOINT_SAVE && shares_memory(target) ? NOT_SUPPORTED : SUCCESS;
}

static int begin_restoring(struct node *node, struct client *target)
{
	if (target->restore_failed)
		return OPERATING_SYSTEM;
	target->restore_failed = !return_to_devices(node, target);
	return target->restore_failed ? OUT_OF_MEMORY : SUCCESS;
}

/* Contexts are in the constants: measured with 256 MiB and 1 GiB. */
static uint64_t duration_ns(const struct node *node, const struct client *target, enum checkpoint_op op)
{
	const struct config *config = &node->config;
	double bytes = 0;

	for (size_t i = 0; i < target->allocation_count; i++)
		bytes += (double)target->allocations[i].bytes;
	if (op == CHECKPOINT_SAVE)
		return config->save_ns + (uint64_t)(bytes * 1e9 / (double)config->save_bytes_per_second);
	if (op == CHECKPOINT_RESTORE)
		return config->restore_ns + (uint64_t)(bytes * 1e9 / (double)config->restore_bytes_per_second);
	return op == CHECKPOINT_UNLOCK ? UNLOCK_NS : 0;
}

static void start(struct node *node, struct client *caller, struct client *target, uint64_t now_ns)
{
	struct question *question = &caller->question;
	int result = objection(target, question->op);

	if (result == SUCCESS && question->op == CHECKPOINT_RESTORE)
		result = begin_restoring(node, target);
	if (result != SUCCESS) {
		answer(node, caller, result, 0);
		return;
	}
	if (question->op == CHECKPOINT_LOCK)
		set_locked(target, true);
	question->begun = true;
	target->transition = (struct transition){.op = question->op,
						 .caller = caller->id,
						 .deadline_ns = question->deadline_ns,
						 .done_ns = now_ns + duration_ns(node, target, question->op)};
	go_on(node, target, now_ns);
}

static struct client *target_of(const struct node *node, uint32_t pid)
{
	for (struct client *client = node->clients; client; client = client->next)
		if (client->pid == pid && client->shared && !client->doomed)
			return client;
	return NULL;
}

static bool exists(uint32_t pid)
{
	char path[64];

	snprintf(path, sizeof(path), "/proc/%u/stat", pid);
	return file_has(path, ")");
}

static uint32_t state_shown(const struct client *target)
{
	return target->transition.op == CHECKPOINT_LOCK ? STATE_LOCKED : target->state;
}

static void serve_question(struct node *node, struct client *caller, uint64_t now_ns)
{
	const struct question *question = &caller->question;
	struct client *target = target_of(node, question->pid);

	if (!target)
		answer(node, caller, exists(question->pid) ? NOT_INITIALIZED : OPERATING_SYSTEM, 0);
	else if (caller->uid && caller->uid != target->uid)
		answer(node, caller, NOT_PERMITTED, 0);
	else if (question->op == CHECKPOINT_STATE)
		answer(node, caller, SUCCESS, state_shown(target));
	else if (question->op == CHECKPOINT_THREAD)
		answer(node, caller, SUCCESS, target->pid);
	else if (question->begun && target->transition.caller != caller->id)
		answer(node, caller, INVALID_VALUE, 0); /* another program now: it was exec'ed */
	else if (!target->transition.op)
		start(node, caller, target, now_ns);
	else if (!question->begun && question->op == CHECKPOINT_LOCK && now_ns >= question->deadline_ns)
		answer(node, caller, NOT_READY, 0);
}

void checkpoint_ask(struct node *node, struct client *client, const struct query *query)
{
	uint64_t now_ns = clock_ns();

	if (query->b < CHECKPOINT_STATE || query->b > CHECKPOINT_UNLOCK) {
		query_reply(client, EINVAL, NULL, 0, 0);
		return;
	}
	client->question = (struct question){.op = (enum checkpoint_op)query->b,
					     .pid = (uint32_t)query->a,
					     .deadline_ns = query->c ? now_ns + query->c * NS_PER_MS : UINT64_MAX};
	serve_question(node, client, now_ns);
}

void checkpoints_run(struct node *node, uint64_t now_ns)
{
	for (struct client *client = node->clients; client; client = client->next)
		if (client->transition.op && !client->doomed)
			go_on(node, client, now_ns);
	for (struct client *client = node->clients; client; client = client->next)
		if (client->question.op && !client->doomed)
			serve_question(node, client, now_ns);
}

uint64_t checkpoints_next(const struct node *node, uint64_t now_ns)
{
	for (const struct client *client = node->clients; client; client = client->next)
		if (client->transition.op || client->question.op)
			return now_ns + POLL_NS;
	return UINT64_MAX;
}

uint32_t checkpoint_fault(struct node *node, uint32_t pid)
{
	struct client *target = target_of(node, pid);

	if (!target)
		return ESRCH;
	target->checkpoint_fails = true;
	return 0;
}
