/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Copies over PCIe: one link for each direction of a device. Copies in flight have equal parts of its bandwidth, none is
 * stopped for another one, and beyond the configuration's number of them they wait in the order in which they came.
 */
#include "model_parts.h"

#define NEARLY_ONE 0.999999 /* ends are rounded up, but for what a sum of doubles is off */
#define COPY_LATENCY_NS 2000 /* of a copy alone; it takes its part of the link */

static uint64_t bandwidth(const struct device *device)
{
	return device->model->config.copy_bytes_per_second;
}

/* Every copy in flight gets as many bytes: those that each has had since the link was first used. */
static void engine_update(struct device *device, struct engine *engine, uint64_t now_ns)
{
	double elapsed_ns = (double)(now_ns - engine->since_ns);

	if (engine->count)
		engine->served_bytes += elapsed_ns * (double)bandwidth(device) / 1e9 / engine->count;
	engine->since_ns = now_ns;
}

/* By their ends. */
static void run(struct device *device, struct engine *engine, struct op *op)
{
	double latency_bytes = (double)COPY_LATENCY_NS * (double)bandwidth(device) / 1e9;
	struct op **link = &engine->running;

	op->copy_end_bytes = engine->served_bytes + (double)op->command.b + latency_bytes;
	while (*link && (*link)->copy_end_bytes <= op->copy_end_bytes)
		link = &(*link)->ready_next;
	op->ready_next = *link;
	*link = op;
	engine->count++;
	op->stream->context->copying++;
}

static bool has_room(const struct device *device, const struct engine *engine)
{
	uint64_t most = device->model->config.copies_at_once;

	return !most || engine->count < most;
}

void copy_begin(struct device *device, struct op *op, uint64_t now_ns)
{
	/* what goes to another device counts as leaving this one */
	struct engine *engine = &device->engines[op->command.a == COPY_H2D ? COPY_H2D : COPY_D2H];

	op->started = true;
	op->ready_next = NULL;
	engine_update(device, engine, now_ns);
	if (has_room(device, engine))
		run(device, engine, op);
	else if (engine->last)
		engine->last = engine->last->ready_next = op;
	else
		engine->first = engine->last = op;
}

void copies_forget(struct device *device, const struct context *context)
{
	for (int e = 0; e < 2; e++) {
		struct engine *engine = &device->engines[e];
		struct op **link = &engine->first, *op;

		engine->last = NULL;
		while ((op = *link)) {
			if (op->stream->context == context) {
				*link = op->ready_next;
				op->started = false;
			} else {
				engine->last = op;
				link = &op->ready_next;
			}
		}
	}
}

static uint64_t engine_next(const struct device *device, const struct engine *engine)
{
	double left;

	if (!engine->running)
		return NEVER;
	left = (engine->running->copy_end_bytes - engine->served_bytes) * engine->count;
	return engine->since_ns + (left > 0 ? (uint64_t)(left * 1e9 / (double)bandwidth(device) + NEARLY_ONE) : 0);
}

uint64_t copies_next(const struct device *device)
{
	uint64_t to = engine_next(device, &device->engines[COPY_H2D]);
	uint64_t from = engine_next(device, &device->engines[COPY_D2H]);

	return to < from ? to : from;
}

struct op *copy_take(struct device *device, uint64_t now_ns)
{
	for (int e = 0; e < 2; e++) {
		struct engine *engine = &device->engines[e];
		struct op *op = engine->running, *next = engine->first;

		if (engine_next(device, engine) > now_ns)
			continue;
		engine_update(device, engine, now_ns);
		engine->running = op->ready_next;
		engine->count--;
		op->stream->context->copying--;
		if (next) {
			engine->first = next->ready_next;
			if (!engine->first)
				engine->last = NULL;
			run(device, engine, next);
		}
		return op;
	}
	return NULL;
}
