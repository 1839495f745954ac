/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "model.h"

#include <stdlib.h>
#include <string.h>

#define NEVER UINT64_MAX
#define MOST_DEAD_RECORDS 4096
#define COPY_LATENCY_NS 2000
#define COPY_BLOCK_BYTES 65536
#define THREADS_PER_SM 2048
#define BLOCKS_PER_SM 32
/* What a client asks for is bounded here, so that no sum of times can wrap around. */
#define LONGEST_BLOCK_NS 3600000000000ull
#define LARGEST_COPY_BYTES (1ull << 44)
/* Short blocks run in bunches of about this length: their number costs the server nothing, at this grain of time. */
#define BUNCH_NS 50000
#define STREAM_PRIORITIES 6 /* CUDA's 0 (least) to -5 */

struct op {
	struct op *next; /* in its stream */
	struct op *ready_next, *ready_previous; /* in its device's ready list */
	struct stream *stream;
	struct stream *awaited;
	struct command command;
	uint64_t block_ns, blocks_left; /* of work on SMs; left: not yet on one */
	uint32_t threads; /* of a block */
	uint32_t per_sm; /* blocks on each SM when it is alone: its block time is meant for so many */
	uint32_t placed; /* parts of it that SMs hold */
	bool ready, started;
};

struct stream {
	struct stream *next; /* in its context */
	struct context *context;
	struct op *first, *last;
	uint64_t completed;
	uint32_t number;
	uint32_t awaiters; /* operations anywhere that wait for this stream */
	int urgency; /* less is served first */
	bool ended, blocked;
};

struct part { /* what is in a slot of an SM: a block, or short blocks that run one after another */
	struct op *op;
	uint64_t ns; /* of the whole SM */
};

/* SMs that hold the same. An SM works on the part that came first; the others wait in their slots. */
struct sm_set {
	struct sm_set *next; /* in its group, by end */
	uint64_t end_ns; /* of the first part; while the group is preempted, its ns is what is left of it */
	uint32_t count, length, threads;
	struct part parts[BLOCKS_PER_SM];
};

/* Contexts that run side by side: all MPS clients of a device, or one context alone. */
struct group {
	struct group *next_preempted;
	struct sm_set *busy;
	uint64_t last_active_ns;
	uint32_t idle_sms, contexts;
};

struct context {
	struct context *next; /* in its device */
	struct device *device;
	struct group *group;
	struct stream *streams;
	struct record *record;
	void *owner; /* NULL: ended */
	uint32_t cap, placed, copying;
	uint32_t queued; /* operations submitted and not completed */
	int priority;
};

enum item_kind { ITEM_COPY, ITEM_SWITCHED };

struct item { /* something that ends */
	uint64_t at_ns;
	uint64_t order;
	enum item_kind kind;
	struct op *op;
};

struct engine {
	struct op *running;
	struct op *first, *last; /* waiting, linked by ready_next */
};

struct device {
	struct model *model;
	unsigned index, sms;
	uint64_t memory_bytes, dram_bytes_per_second;
	struct context *contexts;
	struct group shared; /* of the MPS clients */
	struct group *active, *preempted;
	uint64_t slice_end_ns;
	bool switching, contended; /* contended: another group waits for its turn */
	uint32_t free_sms;
	struct op *ready_first, *ready_last;
	struct engine engines[2]; /* COPY_H2D, COPY_D2H */
	struct item *items;
	size_t item_count, item_room;
	uint64_t since_ns, sm_ns, busy_ns, tx_bytes, rx_bytes, memory_used;
};

struct model {
	struct config config;
	struct model_events events;
	uint64_t now_ns, order;
	int blocked; /* streams that wait for another one */
	unsigned device_count;
	struct device devices[MAX_DEVICES];
	struct record **records;
	size_t record_count, record_room;
};

static void *must(void *memory)
{
	if (!memory)
		abort();
	return memory;
}

/* ---- the heap of what ends when ---- */

static bool before(const struct item *a, const struct item *b)
{
	return a->at_ns != b->at_ns ? a->at_ns < b->at_ns : a->order < b->order;
}

static void item_push(struct device *device, uint64_t at_ns, enum item_kind kind, struct op *op)
{
	size_t i = device->item_count++, parent;
	struct item item = {at_ns, device->model->order++, kind, op};

	if (device->item_count > device->item_room) {
		device->item_room = device->item_room ? device->item_room * 2 : 64;
		device->items = must(realloc(device->items, device->item_room * sizeof(item)));
	}
	for (; i; i = parent) {
		parent = (i - 1) / 2;
		if (before(&device->items[parent], &item))
			break;
		device->items[i] = device->items[parent];
	}
	device->items[i] = item;
}

static struct item item_pop(struct device *device)
{
	struct item top = device->items[0], last = device->items[--device->item_count];
	size_t i = 0, child;

	while ((child = 2 * i + 1) < device->item_count) {
		if (child + 1 < device->item_count && before(&device->items[child + 1], &device->items[child]))
			child++;
		if (before(&last, &device->items[child]))
			break;
		device->items[i] = device->items[child];
		i = child;
	}
	device->items[i] = last;
	return top;
}

/* ---- counters ---- */

static void record_update(struct record *record, uint64_t now_ns)
{
	uint64_t elapsed = now_ns - record->since_ns;

	record->sm_ns += elapsed * record->held;
	if (record->held)
		record->truth.busy_ns += elapsed;
	record->since_ns = now_ns;
}

static void device_update(struct device *device, uint64_t now_ns)
{
	uint32_t held = device->sms - device->free_sms;
	uint64_t elapsed = now_ns - device->since_ns;

	device->sm_ns += elapsed * held;
	if (held)
		device->busy_ns += elapsed;
	device->since_ns = now_ns;
}

static void hold(struct context *context, int64_t change, uint64_t now_ns)
{
	struct device *device = context->device;

	device_update(device, now_ns);
	record_update(context->record, now_ns);
	device->free_sms -= (uint32_t)change;
	context->record->held += (uint32_t)change;
}

/* ---- ready kernels ---- */

/* The list is in the order of service: by urgency, then by age. */
static void ready_add(struct device *device, struct op *op)
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

static void ready_remove(struct device *device, struct op *op)
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

/* Copies within the device and memset are kernels too. */
static bool on_sms(const struct command *command)
{
	return command->kind == CMD_KERNEL ||
	       (command->kind == CMD_COPY && (command->a == COPY_D2D || command->a == COPY_SET));
}

static void shape_kernel(struct op *op, unsigned sms)
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

/* A large copy takes whole SMs, all of them: what it waits for is the memory. */
static void shape_copy(struct op *op, const struct device *device)
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

/* Its SMs begin with the part that is now the first. */
static void run_first(struct sm_set *set, uint64_t now_ns)
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

/* Puts so many blocks into one more slot of each SM of the set. */
static void fill_slot(struct sm_set *set, struct op *op, uint64_t blocks, uint64_t now_ns)
{
	uint64_t ns = blocks * op->block_ns / op->per_sm;

	set->parts[set->length++] = (struct part){op, ns ? ns : 1};
	set->threads += op->threads;
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
		if (set->threads + op->threads <= THREADS_PER_SM && set->length < BLOCKS_PER_SM &&
		    (!best || set->threads < best->threads) && (more || holds(set, op->stream->context)))
			best = set;
	return best;
}

/* Puts blocks on SMs, a slot on each of those that are alike: idle ones first. False: none has room. */
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
	fill_slot(set, op, blocks, now_ns);
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

/* Goes on where it was stopped. */
static void resume(struct device *device, uint64_t now_ns)
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

static void dispatch(struct device *device, uint64_t now_ns)
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
	item_push(device, now_ns + device->model->config.switch_ns, ITEM_SWITCHED, NULL);
}

/* ---- streams ---- */

static void copy_start(struct device *device, struct op *op, uint64_t now_ns)
{
	op->stream->context->copying++;
	item_push(device, now_ns + copy_ns(op, device->model->config.copy_bytes_per_second), ITEM_COPY, op);
}

static void copy_queue(struct device *device, struct op *op, uint64_t now_ns)
{
	struct engine *engine;

	op->started = true;
	if (op->command.a > COPY_D2H) {
		copy_start(device, op, now_ns);
		return;
	}
	engine = &device->engines[op->command.a];
	op->ready_next = NULL;
	if (!engine->running) {
		engine->running = op;
		copy_start(device, op, now_ns);
	} else if (engine->last) {
		engine->last = engine->last->ready_next = op;
	} else {
		engine->first = engine->last = op;
	}
}

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
			copy_queue(device, op, now_ns);
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

static void engine_forget(struct engine *engine, const struct context *context)
{
	struct op **link = &engine->first, *op;

	engine->last = NULL;
	while ((op = *link)) {
		if (op->stream->context == context) {
			*link = op->ready_next;
		} else {
			engine->last = op;
			link = &op->ready_next;
		}
	}
}

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
	for (int e = 0; e < 2; e++)
		engine_forget(&device->engines[e], context);
	for (struct stream *stream = context->streams; stream; stream = stream->next) {
		struct op *op = stream->first;

		/* a copy that waited for its engine never started */
		if (op && op->command.kind == CMD_COPY && op->started && op->command.a <= COPY_D2H &&
		    device->engines[op->command.a].running != op)
			op->started = false;
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
	set->threads -= part.op->threads;
	memmove(&set->parts[0], &set->parts[1], --set->length * sizeof(part));
	if (set->length) {
		run_first(set, now_ns);
	} else {
		group->idle_sms += set->count;
		free(set);
	}
	if (part.op->blocks_left || part.op->placed)
		return;
	if (context->owner && part.op->command.kind == CMD_KERNEL)
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

static void copy_end(struct device *device, const struct item *item)
{
	struct op *op = item->op;
	struct context *context = op->stream->context;
	struct engine *engine;

	if (op->command.a == COPY_D2H) {
		device->tx_bytes += op->command.b;
		context->record->truth.tx_bytes += op->command.b;
	} else if (op->command.a == COPY_H2D) {
		device->rx_bytes += op->command.b;
		context->record->truth.rx_bytes += op->command.b;
	} else if (op->command.a == COPY_PEER) {
		peer_copy_end(device->model, op);
	}
	context->copying--;
	if (op->command.a <= COPY_D2H) {
		engine = &device->engines[op->command.a];
		engine->running = engine->first;
		if (engine->first) {
			engine->first = engine->first->ready_next;
			if (!engine->first)
				engine->last = NULL;
			copy_start(device, engine->running, item->at_ns);
		}
	}
	op_done(op, item->at_ns);
	context_free_if_idle(context);
}

static uint64_t part_end_ns(const struct device *device)
{
	return device->active && device->active->busy && !device->switching ? device->active->busy->end_ns : NEVER;
}

static uint64_t device_next(const struct device *device)
{
	uint64_t next = device->item_count ? device->items[0].at_ns : NEVER, end = part_end_ns(device);

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

static void item_end(struct device *device, const struct item *item)
{
	if (item->kind == ITEM_COPY) {
		copy_end(device, item);
		return;
	}
	device->switching = false;
	device->slice_end_ns = item->at_ns + device->model->config.timeslice_ns;
	resume(device, item->at_ns);
}

bool model_step(struct model *model, uint64_t to)
{
	uint64_t at_ns;
	struct device *device = earliest(model, &at_ns);
	struct item item;

	if (!device || at_ns > to)
		return false;
	if (at_ns > model->now_ns)
		model->now_ns = at_ns;
	if (device->item_count && device->items[0].at_ns == at_ns) {
		item = item_pop(device);
		item_end(device, &item);
	}
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
		free(device->items);
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
