/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Which blocks are on which SMs, and whose turn it is. SMs that hold the same are one set, so a kernel that fills the
 * device costs a few events. Only sets of the group whose turn it is make progress.
 */
#include "model_parts.h"

#include <stdlib.h>

#define COPY_LATENCY_NS 2000
#define COPY_BLOCK_BYTES 65536
#define THREADS_PER_SM 2048
/* Short blocks run in bunches of about this length: their number costs the server nothing, at this grain of time. */
#define BUNCH_NS 50000
/* Blocks that take an SM less than this are put into several slots at once, whose end is one event. */
#define SLOTS_NS 20000

void hold(struct context *context, int64_t change, uint64_t now_ns)
{
	struct device *device = context->device;

	device_update(device, now_ns);
	record_update(context->record, now_ns);
	device->free_sms -= (uint32_t)change;
	context->record->held += (uint32_t)change;
}

/* ---- ready kernels ---- */

/* The list is in the order of service: by urgency, then by age. */
void ready_add(struct device *device, struct op *op)
{
	struct op *previous = device->ready_last;

	while (previous && previous->stream->urgency > op->stream->urgency)
		previous = previous->ready_previous;
	op->ready = true;
	op->ready_previous = previous;
	op->ready_next = previous ? previous->ready_next : device->ready_first;
	if (previous)
		previous->ready_next = op;
	else
		device->ready_first = op;
	if (op->ready_next)
		op->ready_next->ready_previous = op;
	else
		device->ready_last = op;
}

void ready_remove(struct device *device, struct op *op)
{
	if (!op->ready)
		return;
	op->ready = false;
	if (op->ready_previous)
		op->ready_previous->ready_next = op->ready_next;
	else
		device->ready_first = op->ready_next;
	if (op->ready_next)
		op->ready_next->ready_previous = op->ready_previous;
	else
		device->ready_last = op->ready_previous;
}

bool on_sms(const struct command *command)
{
	return command->kind == CMD_KERNEL ||
	       (command->kind == CMD_COPY && (command->a == COPY_D2D || command->a == COPY_SET));
}

void shape_kernel(struct op *op, unsigned sms)
{
	uint64_t most, spread = (op->command.a - 1) / sms + 1;

	op->threads = (uint32_t)op->command.b;
	op->block_ns = op->command.c;
	op->blocks_left = op->command.a;
	most = THREADS_PER_SM / op->threads;
	if (most > BLOCKS_PER_SM)
		most = BLOCKS_PER_SM;
	op->per_sm = (uint32_t)(spread < most ? spread : most);
}

static uint64_t copy_ns(const struct op *op, uint64_t bytes_per_second)
{
	return COPY_LATENCY_NS + (uint64_t)((double)op->command.b * 1e9 / (double)bytes_per_second);
}

void shape_copy(struct op *op, const struct device *device)
{
	uint64_t blocks = 1 + op->command.b / COPY_BLOCK_BYTES;

	op->threads = THREADS_PER_SM;
	op->per_sm = 1;
	op->block_ns = copy_ns(op, device->dram_bytes_per_second);
	op->blocks_left = blocks < device->sms ? blocks : device->sms;
}

/* ---- dispatching ---- */

static void note_start(struct op *op, uint64_t now_ns)
{
	struct truth_entry *truth = &op->stream->context->record->truth;
	uint64_t waited = now_ns - op->command.at_ns;

	op->started = true;
	truth->queued_ns += waited;
	if (waited > truth->queued_max_ns)
		truth->queued_max_ns = waited;
}

static struct context *first_context(const struct sm_set *set)
{
	return set->parts[0].op->stream->context;
}

static void enqueue_set(struct group *group, struct sm_set *set)
{
	struct sm_set **link = &group->busy;

	while (*link && (*link)->end_ns <= set->end_ns)
		link = &(*link)->next;
	set->next = *link;
	*link = set;
}

void run_first(struct sm_set *set, uint64_t now_ns)
{
	if (!set->parts[0].op->started)
		note_start(set->parts[0].op, now_ns);
	set->end_ns = now_ns + set->parts[0].ns;
	hold(first_context(set), set->count, now_ns);
	enqueue_set(first_context(set)->group, set);
}

/* How many blocks of a kernel run one after another in a slot before the next event. */
static uint64_t bunch(const struct op *op, const struct device *device)
{
	uint64_t most = BUNCH_NS * op->per_sm / op->block_ns,
		 waves = op->blocks_left / ((uint64_t)op->per_sm * device->sms);

	if (most > waves)
		most = waves;
	return most ? most : 1;
}

/* Into how many slots of each SM of the set blocks are put at once, of those for which there are enough. */
static uint32_t slots_at_once(const struct sm_set *set, const struct op *op, uint64_t blocks)
{
	uint64_t slots = SLOTS_NS * op->per_sm / (blocks * op->block_ns),
		 enough = op->blocks_left / (blocks * set->count);

	if (slots > enough)
		slots = enough;
	if (slots > (THREADS_PER_SM - set->threads) / op->threads)
		slots = (THREADS_PER_SM - set->threads) / op->threads;
	if (slots > BLOCKS_PER_SM - set->slots)
		slots = BLOCKS_PER_SM - set->slots;
	return slots ? (uint32_t)slots : 1;
}

/* Puts so many blocks each into more slots of each SM of the set. */
static void fill_slots(struct sm_set *set, struct op *op, uint64_t blocks, uint64_t now_ns)
{
	uint32_t slots = slots_at_once(set, op, blocks);
	uint64_t ns;

	blocks *= slots;
	ns = blocks * op->block_ns / op->per_sm;
	set->parts[set->length++] = (struct part){op, ns ? ns : 1, slots};
	set->slots += slots;
	set->threads += slots * op->threads;
	op->placed += set->count;
	op->stream->context->placed += set->count;
	op->blocks_left -= blocks * set->count;
	if (set->length == 1)
		run_first(set, now_ns);
}

/* Leaves `count` of its SMs in the set; the rest become another one. */
static void split_set(struct group *group, struct sm_set *set, uint32_t count)
{
	struct sm_set *rest = must(malloc(sizeof(*rest)));

	*rest = *set;
	rest->count = set->count - count;
	set->count = count;
	enqueue_set(group, rest);
}

static bool holds(const struct sm_set *set, const struct context *context)
{
	for (uint32_t i = 0; i < set->length; i++)
		if (set->parts[i].op->stream->context == context)
			return true;
	return false;
}

/* SMs that the context may take beyond those on which it has something. */
static uint32_t more_sms(const struct group *group, const struct context *context)
{
	uint32_t left = context->cap;

	if (context->cap == context->device->sms)
		return left;
	for (const struct sm_set *set = group->busy; set; set = set->next)
		if (holds(set, context))
			left -= set->count;
	return left;
}

/* The SMs with the fewest threads that have room for a block; NULL: none. */
static struct sm_set *roomiest(const struct group *group, const struct op *op, uint32_t more)
{
	struct sm_set *best = NULL;

	for (struct sm_set *set = group->busy; set; set = set->next)
		if (set->threads + op->threads <= THREADS_PER_SM && set->slots < BLOCKS_PER_SM &&
		    (!best || set->threads < best->threads) && (more || holds(set, op->stream->context)))
			best = set;
	return best;
}

/* Puts blocks on SMs, as many on each of those that are alike: idle ones first. False: none has room. */
static bool place(struct device *device, struct group *group, struct op *op, uint64_t now_ns)
{
	uint32_t more = more_sms(group, op->stream->context);
	uint64_t blocks = bunch(op, device), most = op->blocks_left / blocks;
	struct sm_set *set;

	if (group->idle_sms && more) {
		set = must(calloc(1, sizeof(*set)));
		set->count = group->idle_sms < more ? group->idle_sms : more;
		if (set->count > most)
			set->count = (uint32_t)most;
		group->idle_sms -= set->count;
	} else {
		set = roomiest(group, op, more);
		if (!set)
			return false;
		if (!holds(set, op->stream->context) && most > more)
			most = more;
		if (set->count > most)
			split_set(group, set, (uint32_t)most);
	}
	fill_slots(set, op, blocks, now_ns);
	return true;
}

/* Places the group's ready kernels in their order; one that finds no room lets the next one pass. */
static void dispatch_group(struct device *device, struct group *group, uint64_t now_ns)
{
	struct op *op, *next;

	for (op = device->ready_first; op; op = next) {
		next = op->ready_next;
		if (op->stream->context->group != group)
			continue;
		while (op->blocks_left && place(device, group, op, now_ns))
			;
		if (!op->blocks_left)
			ready_remove(device, op);
	}
}

/* ---- turns ---- */

static void preempt(struct device *device, uint64_t now_ns)
{
	struct group *group = device->active;

	group->last_active_ns = now_ns;
	if (!group->busy)
		return;
	for (struct sm_set *set = group->busy; set; set = set->next) {
		hold(first_context(set), -(int64_t)set->count, now_ns);
		set->parts[0].ns = set->end_ns - now_ns;
	}
	group->next_preempted = device->preempted;
	device->preempted = group;
}

void resume(struct device *device, uint64_t now_ns)
{
	struct group *group = device->active, **link = &device->preempted;

	if (!group || !group->busy)
		return;
	while (*link != group)
		link = &(*link)->next_preempted;
	*link = group->next_preempted;
	for (struct sm_set *set = group->busy; set; set = set->next) {
		hold(first_context(set), set->count, now_ns);
		set->end_ns = now_ns + set->parts[0].ns;
	}
}

static struct group *longest_without(struct group *one, struct group *other)
{
	return !one || other->last_active_ns < one->last_active_ns ? other : one;
}

/* The group whose turn is next, of those that have work and do not run. */
static struct group *next_group(const struct device *device)
{
	struct group *best = NULL;

	for (struct group *group = device->preempted; group; group = group->next_preempted)
		best = longest_without(best, group);
	for (struct op *op = device->ready_first; op; op = op->ready_next)
		if (op->stream->context->group != device->active)
			best = longest_without(best, op->stream->context->group);
	return best;
}

static bool has_work(const struct device *device, const struct group *group)
{
	if (!group || group->busy)
		return group != NULL;
	for (struct op *op = device->ready_first; op; op = op->ready_next)
		if (op->stream->context->group == group)
			return true;
	return false;
}

/* Slices of a group that is alone follow one another: one that comes waits for the end of the present one. */
static void renew_slice(struct device *device, uint64_t now_ns)
{
	uint64_t slice = device->model->config.timeslice_ns;

	if (slice && now_ns >= device->slice_end_ns)
		device->slice_end_ns += ((now_ns - device->slice_end_ns) / slice + 1) * slice;
}

void dispatch(struct device *device, uint64_t now_ns)
{
	bool active_has_work;
	struct group *other;

	if (device->switching)
		return;
	other = next_group(device);
	active_has_work = has_work(device, device->active);
	if (other && !device->contended)
		renew_slice(device, now_ns);
	device->contended = other && active_has_work;
	if (active_has_work && (!other || now_ns < device->slice_end_ns)) {
		dispatch_group(device, device->active, now_ns);
		return;
	}
	if (!other)
		return;
	if (device->active)
		preempt(device, now_ns);
	device->active = other;
	device->switching = true;
	device->switched_ns = now_ns + device->model->config.switch_ns;
}
