/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "model_parts.h"

#include <stdlib.h>
#include <string.h>

#define MOST_DEAD_RECORDS 4096
/* What a client asks for is bounded here, so that no sum of times can wrap around. */
#define LONGEST_BLOCK_NS 3600000000000ull
#define LARGEST_COPY_BYTES (1ull << 44)
#define STREAM_PRIORITIES 6 /* CUDA's 0 (least) to -5 */

void *must(void *memory)
{
	if (!memory)
		abort();
	return memory;
}

/* ---- counters ---- */

void record_update(struct record *record, uint64_t now_ns)
{
	uint64_t elapsed = now_ns - record->since_ns;

	record->sm_ns += elapsed * record->held;
	if (record->held)
		record->truth.busy_ns += elapsed;
	record->since_ns = now_ns;
}

void device_update(struct device *device, uint64_t now_ns)
{
	uint32_t held = device->sms - device->free_sms;
	uint64_t elapsed = now_ns - device->since_ns;

	device->sm_ns += elapsed * held;
	if (held)
		device->busy_ns += elapsed;
	device->since_ns = now_ns;
}

/* ---- streams ---- */

static void op_free(struct op *op)
{
	if (op->awaited)
		op->awaited->awaiters--;
	free(op);
}

static void stream_pop(struct stream *stream)
{
	struct op *op = stream->first;

	stream->context->queued--;
	stream->completed = op->command.sequence;
	stream->first = op->next;
	if (!stream->first)
		stream->last = NULL;
	if (stream->context->owner)
		stream->context->device->model->events.completed(stream->context->owner, stream->number,
								 stream->completed);
	op_free(op);
}

/* One more or one less stream of a context that waits for another one. */
static void count_blocked(struct stream *stream, bool blocked)
{
	if (stream->blocked != blocked)
		stream->context->device->model->blocked += blocked ? 1 : -1;
	stream->blocked = blocked;
}

static bool must_wait(const struct op *op)
{
	return op->command.kind == CMD_WAIT && op->awaited && op->awaited->completed < op->command.b;
}

/* Starts what the stream has come to; passes over whatever takes no time. */
static void stream_go(struct stream *stream, uint64_t now_ns)
{
	struct device *device = stream->context->device;
	struct op *op;

	count_blocked(stream, false);
	while ((op = stream->first) && !op->started && !op->ready) {
		if (on_sms(&op->command)) {
			ready_add(device, op);
			return;
		}
		if (op->command.kind == CMD_COPY) {
			copy_begin(device, op, now_ns);
			return;
		}
		if (must_wait(op)) {
			count_blocked(stream, true);
			return;
		}
		if (op->command.kind == CMD_MARK && stream->context->owner)
			device->model->events.mark(stream->context->owner, (uint32_t)op->command.a, now_ns);
		stream_pop(stream);
	}
}

static void context_forget_awaited(struct context *context, struct stream *gone)
{
	for (struct stream *stream = context->streams; stream && gone->awaiters; stream = stream->next)
		for (struct op *op = stream->first; op; op = op->next)
			if (op->awaited == gone) {
				op->awaited = NULL;
				gone->awaiters--;
			}
}

/* A stream goes away: a command that still waits for it, further back in a queue, has nothing to wait for. */
static void forget_awaited(struct stream *gone)
{
	struct model *model = gone->context->device->model;

	for (unsigned d = 0; d < model->device_count && gone->awaiters; d++)
		for (struct context *c = model->devices[d].contexts; c; c = c->next)
			context_forget_awaited(c, gone);
}

static void stream_free(struct stream *stream)
{
	struct stream **link = &stream->context->streams;

	while (*link != stream)
		link = &(*link)->next;
	*link = stream->next;
	forget_awaited(stream);
	free(stream);
}

/* A stream that was destroyed lives until its queue is empty. */
static void stream_free_if_over(struct stream *stream)
{
	if (stream->ended && !stream->first)
		stream_free(stream);
}

static bool context_unblock(struct context *context, uint64_t now_ns)
{
	bool any = false;

	for (struct stream *stream = context->streams, *next; stream; stream = next) {
		next = stream->next;
		if (!stream->blocked || must_wait(stream->first))
			continue;
		stream_go(stream, now_ns);
		stream_free_if_over(stream);
		any = true;
	}
	if (any)
		dispatch(context->device, now_ns);
	return any;
}

/* Streams of the same owner that wait for another stream look again, until none gets on. */
static void unblock(struct model *model, const void *owner, uint64_t now_ns)
{
	bool again = model->blocked > 0;

	while (again) {
		again = false;
		for (unsigned d = 0; d < model->device_count; d++)
			for (struct context *c = model->devices[d].contexts; c; c = c->next)
				if (c->owner == owner && context_unblock(c, now_ns))
					again = true;
	}
}

static void op_done(struct op *op, uint64_t now_ns)
{
	struct stream *stream = op->stream;
	struct context *context = stream->context;

	stream_pop(stream);
	stream_go(stream, now_ns);
	if (context->owner)
		unblock(context->device->model, context->owner, now_ns);
	stream_free_if_over(stream);
}

/* ---- ending ---- */

static void stream_drop_queue(struct stream *stream)
{
	struct op *op = stream->first, *next;
	struct op *kept = NULL;

	count_blocked(stream, false);
	for (; op; op = next) {
		next = op->next;
		ready_remove(stream->context->device, op);
		op->blocks_left = 0;
		if (op == stream->first &&
		    (op->placed || (op->command.kind == CMD_COPY && !on_sms(&op->command) && op->started)))
			kept = op;
		else
			op_free(op);
	}
	stream->first = stream->last = kept;
	if (kept)
		kept->next = NULL;
}

static void context_free_if_idle(struct context *context)
{
	struct device *device = context->device;
	struct context **link = &device->contexts;
	struct stream *stream;

	if (context->owner || context->placed || context->copying)
		return;
	while (*link != context)
		link = &(*link)->next;
	*link = context->next;
	while ((stream = context->streams)) {
		stream_drop_queue(stream);
		stream_free(stream);
	}
	context->record->uses--;
	if (--context->group->contexts == 0 && context->group != &device->shared) {
		if (device->active == context->group)
			device->active = NULL;
		free(context->group);
	}
	free(context);
}

void context_end(struct context *context)
{
	struct device *device = context->device;
	struct model *model = device->model;
	const void *owner = context->owner;

	for (struct stream *stream = context->streams; stream; stream = stream->next)
		if (stream->first) /* no thread is to wait for what will not happen */
			model->events.completed(context->owner, stream->number, stream->last->command.sequence);
	context->owner = NULL;
	copies_forget(device, context); /* those that wait for their link never start */
	for (struct stream *stream = context->streams; stream; stream = stream->next) {
		stream_drop_queue(stream);
		forget_awaited(stream);
	}
	context_free_if_idle(context);
	unblock(model, owner, model->now_ns);
	dispatch(device, model->now_ns);
}

void stream_end(struct stream *stream)
{
	struct context *context = stream->context;

	stream->ended = true;
	if (stream->first)
		return;
	stream_free(stream);
	unblock(context->device->model, context->owner, context->device->model->now_ns);
}

/* ---- time ---- */

/* The first part of a set of SMs ends, and the next one begins. */
static void part_end(struct group *group, uint64_t now_ns)
{
	struct sm_set *set = group->busy;
	struct part part = set->parts[0];
	struct context *context = part.op->stream->context;

	group->busy = set->next;
	hold(context, -(int64_t)set->count, now_ns);
	part.op->placed -= set->count;
	context->placed -= set->count;
	set->slots -= part.slots;
	set->threads -= part.slots * part.op->threads;
	memmove(&set->parts[0], &set->parts[1], --set->length * sizeof(part));
	if (set->length) {
		run_first(set, now_ns);
	} else {
		group->idle_sms += set->count;
		free(set);
	}
	if (part.op->blocks_left || part.op->placed)
		return;
	if (part.op->command.kind == CMD_COPY) /* on the device: read and written; or set */
		context->device->dram_bytes += part.op->command.b * (part.op->command.a == COPY_D2D ? 2 : 1);
	else if (context->owner)
		context->record->truth.kernels++;
	op_done(part.op, now_ns);
	context_free_if_idle(context);
}

static struct truth_entry *truth_on(struct model *model, uint32_t pid, uint32_t device)
{
	for (size_t i = 0; i < model->record_count; i++) {
		struct truth_entry *truth = &model->records[i]->truth;

		if (truth->alive && truth->pid == pid && truth->device == device)
			return truth;
	}
	return NULL;
}

/* Traffic of both devices; there is no other way between them than the bus. */
static void peer_copy_end(struct model *model, const struct op *op)
{
	uint32_t pid = op->stream->context->record->truth.pid, to = (uint32_t)op->command.c,
		 from = (uint32_t)op->command.d;
	struct truth_entry *source = truth_on(model, pid, from), *destination = truth_on(model, pid, to);

	model->devices[from].tx_bytes += op->command.b;
	model->devices[to].rx_bytes += op->command.b;
	if (source)
		source->peer_tx_bytes += op->command.b;
	if (destination)
		destination->peer_rx_bytes += op->command.b;
}

static void copy_end(struct device *device, struct op *op, uint64_t now_ns)
{
	struct context *context = op->stream->context;

	device->dram_bytes += op->command.b;
	if (op->command.a == COPY_D2H) {
		device->tx_bytes += op->command.b;
		context->record->truth.tx_bytes += op->command.b;
	} else if (op->command.a == COPY_H2D) {
		device->rx_bytes += op->command.b;
		context->record->truth.rx_bytes += op->command.b;
	} else if (op->command.a == COPY_PEER) {
		peer_copy_end(device->model, op);
	}
	op_done(op, now_ns);
	context_free_if_idle(context);
}

static uint64_t part_end_ns(const struct device *device)
{
	return device->active && device->active->busy && !device->switching ? device->active->busy->end_ns : NEVER;
}

static uint64_t device_next(const struct device *device)
{
	uint64_t next = copies_next(device), end = part_end_ns(device);

	if (device->switching && device->switched_ns < next)
		next = device->switched_ns;
	if (device->contended && !device->switching && device->slice_end_ns < next)
		next = device->slice_end_ns;
	return end < next ? end : next;
}

static struct device *earliest(const struct model *model, uint64_t *at_ns)
{
	struct device *best = NULL;

	*at_ns = NEVER;
	for (unsigned d = 0; d < model->device_count; d++) {
		uint64_t next = device_next(&model->devices[d]);

		if (next < *at_ns) {
			*at_ns = next;
			best = (struct device *)&model->devices[d];
		}
	}
	return best;
}

uint64_t model_next(const struct model *model)
{
	uint64_t at_ns;

	earliest(model, &at_ns);
	return at_ns;
}

static void switch_end(struct device *device, uint64_t now_ns)
{
	device->switching = false;
	device->slice_end_ns = now_ns + device->model->config.timeslice_ns;
	resume(device, now_ns);
}

bool model_step(struct model *model, uint64_t to)
{
	uint64_t at_ns;
	struct device *device = earliest(model, &at_ns);
	struct op *copy;

	if (!device || at_ns > to)
		return false;
	if (at_ns > model->now_ns)
		model->now_ns = at_ns;
	if (device->switching && device->switched_ns <= at_ns)
		switch_end(device, at_ns);
	while ((copy = copy_take(device, at_ns)))
		copy_end(device, copy, at_ns);
	while (part_end_ns(device) <= at_ns)
		part_end(device->active, at_ns);
	dispatch(device, at_ns);
	return true;
}

void model_advance(struct model *model, uint64_t to)
{
	while (model_step(model, to))
		;
	if (to > model->now_ns)
		model->now_ns = to;
}

uint64_t model_now(const struct model *model)
{
	return model->now_ns;
}

/* ---- making ---- */

struct model *model_new(const struct config *config, const struct model_events *events)
{
	struct model *model = must(calloc(1, sizeof(*model)));

	model->config = *config;
	model->events = *events;
	for (unsigned d = 0; d < config->gpus; d++)
		device_add(model, config->gpu_sms[d] ? config->gpu_sms[d] : config->sms, config->memory_bytes);
	return model;
}

unsigned device_add(struct model *model, unsigned sms, uint64_t memory_bytes)
{
	const struct config *config = &model->config;
	struct device *device = &model->devices[model->device_count];
	double part = config->memory_bytes ? (double)memory_bytes / (double)config->memory_bytes : 1;

	device->model = model;
	device->index = model->device_count;
	device->sms = device->free_sms = device->shared.idle_sms = sms;
	device->memory_bytes = memory_bytes;
	device->dram_bytes_per_second = (uint64_t)(part * (double)config->dram_bytes_per_second);
	if (!device->dram_bytes_per_second)
		device->dram_bytes_per_second = 1;
	device->since_ns = model->now_ns;
	return model->device_count++;
}

unsigned device_count(const struct model *model)
{
	return model->device_count;
}

unsigned device_sms(const struct model *model, unsigned device)
{
	return model->devices[device].sms;
}

bool device_idle(const struct model *model, unsigned device)
{
	return !model->devices[device].contexts;
}

void model_free(struct model *model)
{
	for (unsigned d = 0; d < model->device_count; d++) {
		struct device *device = &model->devices[d];

		for (struct context *context = device->contexts, *next; context; context = next) {
			next = context->next;
			if (context->owner) /* else it has ended, and its last blocks are still there */
				context_end(context);
		}
		while (device_next(device) != NEVER)
			model_step(model, NEVER);
	}
	for (size_t i = 0; i < model->record_count; i++)
		free(model->records[i]);
	free(model->records);
	free(model);
}

struct context *context_new(struct model *model, unsigned device_index, void *owner, struct record *record, bool mps,
			    unsigned percentage, int priority)
{
	struct device *device = &model->devices[device_index];
	struct context *context = must(calloc(1, sizeof(*context)));
	unsigned sms = device->sms;

	context->device = device;
	context->owner = owner;
	context->record = record;
	record->uses++;
	context->cap = mps && percentage && percentage < 100 ? (sms * percentage + 99) / 100 : sms;
	context->priority = mps && priority > 0 && model->config.mps_priority;
	context->group = mps ? &device->shared : must(calloc(1, sizeof(struct group)));
	context->group->idle_sms = mps ? context->group->idle_sms : sms;
	context->group->contexts++;
	context->next = device->contexts;
	device->contexts = context;
	return context;
}

struct stream *stream_new(struct context *context, uint32_t number, int priority)
{
	struct stream *stream = must(calloc(1, sizeof(*stream)));
	int rank = priority > 0 ? 0 : priority <= -STREAM_PRIORITIES ? STREAM_PRIORITIES - 1 : -priority;

	stream->context = context;
	stream->number = number;
	stream->urgency = context->priority * STREAM_PRIORITIES + STREAM_PRIORITIES - 1 - rank;
	stream->next = context->streams;
	context->streams = stream;
	return stream;
}

static void bound(struct command *command, uint64_t now_ns)
{
	if (command->at_ns > now_ns)
		command->at_ns = now_ns;
	if (command->kind == CMD_KERNEL && command->c > LONGEST_BLOCK_NS)
		command->c = LONGEST_BLOCK_NS;
	if (command->kind == CMD_KERNEL && command->c == 0)
		command->c = 1;
	if (command->kind == CMD_KERNEL && command->b == 0)
		command->b = 1;
	if (command->kind == CMD_COPY && command->b > LARGEST_COPY_BYTES)
		command->b = LARGEST_COPY_BYTES;
}

void stream_submit(struct stream *stream, const struct command *command, struct stream *awaited)
{
	struct context *context = stream->context;
	struct model *model = context->device->model;
	struct op *op = must(calloc(1, sizeof(*op)));
	bool idle = !stream->first;

	op->stream = stream;
	op->command = *command;
	op->awaited = awaited;
	if (awaited)
		awaited->awaiters++;
	bound(&op->command, model->now_ns);
	if (command->kind == CMD_KERNEL) {
		shape_kernel(op, context->device->sms);
		context->record->truth.launches += command->d != 0;
	} else if (on_sms(command)) {
		shape_copy(op, context->device);
	}
	context->queued++;
	if (stream->last)
		stream->last = stream->last->next = op;
	else
		stream->first = stream->last = op;
	if (!idle)
		return;
	stream_go(stream, model->now_ns);
	unblock(model, context->owner, model->now_ns);
	dispatch(context->device, model->now_ns);
}

uint32_t context_queued(const struct context *context)
{
	return context->queued;
}

bool memory_take(struct model *model, unsigned device, uint64_t bytes)
{
	if (bytes > model->devices[device].memory_bytes - model->devices[device].memory_used)
		return false;
	model->devices[device].memory_used += bytes;
	return true;
}

void memory_give(struct model *model, unsigned device, uint64_t bytes)
{
	model->devices[device].memory_used -= bytes;
}

/* ---- reading ---- */

const struct record *record_read(struct model *model, struct record *record)
{
	record_update(record, model->now_ns);
	record->truth.sm_ns = record->sm_ns / record->sms;
	return record;
}

void device_read(struct model *model, unsigned index, struct device_state *state)
{
	struct device *device = &model->devices[index];

	device_update(device, model->now_ns);
	state->at_ns = model->now_ns;
	state->sm_active_ns = device->sm_ns / device->sms;
	state->busy_ns = device->busy_ns;
	state->tx_bytes = device->tx_bytes;
	state->rx_bytes = device->rx_bytes;
	state->dram_bytes = device->dram_bytes;
	state->dram_bytes_per_second = device->dram_bytes_per_second;
	state->memory_used = device->memory_used;
}

static void forget_oldest_dead(struct model *model)
{
	size_t dead = 0, first = model->record_count;

	for (size_t i = 0; i < model->record_count; i++)
		if (!model->records[i]->truth.alive && !model->records[i]->uses) {
			if (first == model->record_count)
				first = i;
			dead++;
		}
	if (dead <= MOST_DEAD_RECORDS)
		return;
	free(model->records[first]);
	memmove(&model->records[first], &model->records[first + 1], (--model->record_count - first) * sizeof(void *));
}

struct record *record_new(struct model *model, unsigned device, uint32_t pid, bool mps, const char *command)
{
	struct record *record = must(calloc(1, sizeof(*record)));

	forget_oldest_dead(model);
	record->sms = model->devices[device].sms;
	record->truth.pid = pid;
	record->truth.device = device;
	record->truth.alive = 1;
	record->truth.mps = mps;
	strncpy(record->truth.command, command, sizeof(record->truth.command) - 1);
	record->since_ns = model->now_ns;
	if (model->record_count == model->record_room) {
		model->record_room = model->record_room ? model->record_room * 2 : 64;
		model->records = must(realloc(model->records, model->record_room * sizeof(void *)));
	}
	model->records[model->record_count++] = record;
	return record;
}

struct record **records(struct model *model, size_t *count)
{
	*count = model->record_count;
	return model->records;
}

void record_dead(struct record *record)
{
	record->truth.alive = 0;
	record->truth.memory_bytes = 0;
}

struct context *stream_context(const struct stream *stream)
{
	return stream->context;
}
