/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The ring to the server. One process-private mutex makes all threads one producer; no thread sleeps while holding it. Nothing in
 * shared memory is a lock, so a thread that dies or stops in here hurts its own process only.
 */
#include "internal.h"

#include <errno.h>
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define NO_STREAM (~0u)

static pthread_mutex_t ring_lock = PTHREAD_MUTEX_INITIALIZER;

/* ring_lock: */
static bool used[MAX_STREAMS];
static struct {
	uint32_t device;
	uint64_t last;
	bool ending;
} numbers[MAX_STREAMS];
/* read without the lock: */
static _Atomic uint64_t generations[MAX_STREAMS];

static pthread_mutex_t reply_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t reply_freed = PTHREAD_COND_INITIALIZER;
static uint64_t replies_used; /* a bit each */

_Static_assert(MAX_REPLIES == 64, "replies_used has a bit for each");

uint64_t clock_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

/* ---- waiting ---- */

typedef bool condition(uint64_t a, uint64_t b, uint64_t c);

static bool sequence_done(uint64_t stream, uint64_t generation, uint64_t sequence)
{
	return atomic_load(&connection.shared->completed[stream]) >= sequence ||
	       atomic_load(&generations[stream]) != generation;
}

static bool ring_has_room(uint64_t head, uint64_t b, uint64_t c)
{
	(void)b, (void)c;
	return head - atomic_load(&connection.shared->tail) < RING_COMMANDS;
}

static bool reply_done(uint64_t slot, uint64_t b, uint64_t c)
{
	(void)b, (void)c;
	return atomic_load(&connection.shared->replies[slot].done);
}

static CUresult wait_until(condition *met, uint64_t a, uint64_t b, uint64_t c)
{
	static const struct timespec patience = {.tv_sec = 1};
	struct shared *shared = connection.shared;

	for (;;) {
		uint32_t progress = atomic_load(&shared->progress);
		CUresult result = ready();
		bool timed_out = false;

		if (result != CUDA_SUCCESS)
			return result;
		if (met(a, b, c))
			return CUDA_SUCCESS;
		atomic_fetch_add(&shared->waiters, 1);
		atomic_thread_fence(memory_order_seq_cst);
		if (!met(a, b, c))
			timed_out =
				syscall(SYS_futex, &shared->progress, FUTEX_WAIT, progress, &patience, NULL, 0) < 0 &&
				errno == ETIMEDOUT;
		atomic_fetch_sub(&shared->waiters, 1);
		if (timed_out)
			connection_alive(true); /* ready() has what it finds */
	}
}

bool point_reached(struct point point)
{
	return sequence_done(point.stream, point.generation, point.sequence);
}

CUresult point_wait(struct point point)
{
	return wait_until(sequence_done, point.stream, point.generation, point.sequence);
}

CUresult point_query(struct point point)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS || point_reached(point))
		return result;
	return connection_alive(false) ? CUDA_ERROR_NOT_READY : CUDA_ERROR_DEVICE_UNAVAILABLE;
}

/* ---- the ring itself; all with ring_lock ---- */

static void ring_bell(void)
{
	uint64_t one = 1;

	/* EAGAIN means that it rings already; a dead server is found by the thread that waits */
	while (write(connection.doorbell, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static uint64_t head_now(void)
{
	return atomic_load_explicit(&connection.shared->head, memory_order_relaxed);
}

static void put(const struct command *command)
{
	struct shared *shared = connection.shared;
	uint64_t head = head_now();

	shared->ring[head % RING_COMMANDS] = *command;
	atomic_store_explicit(&shared->head, head + 1, memory_order_release);
	atomic_thread_fence(memory_order_seq_cst);
	/* While an earlier operation of the stream is pending the server will wake for it, and then sees this one too. */
	if (!command->sequence || atomic_load(&shared->completed[command->stream]) >= command->sequence - 1)
		ring_bell();
}

/* Lets go of the lock while there is no room; the caller must look at its world again. True if it had to. */
static bool made_room_in_ring(CUresult *result)
{
	uint64_t head = head_now();

	if (ring_has_room(head, 0, 0))
		return false;
	ring_bell(); /* the ring may be full of operations without a ring */
	pthread_mutex_unlock(&ring_lock);
	*result = wait_until(ring_has_room, head, 0, 0);
	pthread_mutex_lock(&ring_lock);
	return true;
}

static CUresult put_plain(const struct command *command)
{
	CUresult result = CUDA_SUCCESS;

	while (result == CUDA_SUCCESS && made_room_in_ring(&result))
		;
	if (result == CUDA_SUCCESS)
		put(command);
	return result;
}

/* ---- the gate: a lock from outside stops calls before they begin, and lets those that have begun finish ---- */

static __thread unsigned inside;

static bool unlocked(uint64_t a, uint64_t b, uint64_t c)
{
	(void)a, (void)b, (void)c;
	return !atomic_load(&connection.shared->locked);
}

static void leave(void)
{
	atomic_fetch_sub(&connection.shared->calls, 1);
	if (!unlocked(0, 0, 0))
		ring_bell(); /* the server waits for this */
}

CUresult call_begin(void)
{
	CUresult result = ready();

	while (result == CUDA_SUCCESS && !inside) {
		atomic_fetch_add(&connection.shared->calls, 1);
		if (unlocked(0, 0, 0))
			break;
		leave();
		result = wait_until(unlocked, 0, 0, 0);
	}
	if (result == CUDA_SUCCESS)
		inside++;
	return result;
}

void call_end(void)
{
	if (--inside == 0)
		leave();
}

CUresult call_pass(void)
{
	CUresult result = ready();

	return result == CUDA_SUCCESS && !inside ? wait_until(unlocked, 0, 0, 0) : result;
}

/* ---- requests ---- */

static uint32_t reply_take(void)
{
	uint32_t slot;

	pthread_mutex_lock(&reply_lock);
	while (replies_used == ~0ull)
		pthread_cond_wait(&reply_freed, &reply_lock);
	slot = (uint32_t)__builtin_ctzll(~replies_used);
	replies_used |= 1ull << slot;
	pthread_mutex_unlock(&reply_lock);
	return slot;
}

static void reply_give(uint32_t slot)
{
	pthread_mutex_lock(&reply_lock);
	replies_used &= ~(1ull << slot);
	pthread_cond_signal(&reply_freed);
	pthread_mutex_unlock(&reply_lock);
}

CUresult ring_request(uint32_t kind, uint32_t device, uint64_t a, uint64_t values[2])
{
	struct command command = {.kind = kind, .device = device, .stream = NO_STREAM, .at_ns = clock_ns(), .a = a};
	struct reply *reply;
	CUresult result = call_begin();

	if (result != CUDA_SUCCESS)
		return result;
	command.reply = reply_take();
	reply = &connection.shared->replies[command.reply];
	atomic_store(&reply->done, 0);
	pthread_mutex_lock(&ring_lock);
	result = put_plain(&command);
	pthread_mutex_unlock(&ring_lock);
	if (result == CUDA_SUCCESS)
		result = wait_until(reply_done, command.reply, 0, 0);
	if (result == CUDA_SUCCESS) {
		result = (CUresult)reply->result;
		if (values) {
			values[0] = reply->values[0];
			values[1] = reply->values[1];
		}
	}
	reply_give(command.reply);
	call_end();
	return result;
}

/* ---- operations ---- */

static bool pending(const struct CUstream_st *stream)
{
	return atomic_load(&connection.shared->completed[stream->number]) < stream->sequence;
}

/* The legacy NULL stream begins after, and holds back, all other streams that are not CU_STREAM_NON_BLOCKING. */
static struct CUstream_st *must_wait_for(struct CUstream_st *stream)
{
	struct CUstream_st *null = stream->context->null;

	if (stream->flags & CU_STREAM_NON_BLOCKING || !null)
		return NULL;
	if (stream != null)
		return null->sequence > stream->waits_for_null && pending(null) ? null : NULL;
	for (struct CUstream_st *other = stream->context->streams; other; other = other->next)
		if (other != null && !(other->flags & CU_STREAM_NON_BLOCKING) &&
		    other->sequence > other->null_waits_for && pending(other))
			return other;
	return NULL;
}

static void note_wait(struct CUstream_st *stream, struct CUstream_st *awaited)
{
	if (stream == stream->context->null)
		awaited->null_waits_for = awaited->sequence;
	else
		stream->waits_for_null = awaited->sequence;
}

/* True if there was no room in the stream's queue: the lock was let go meanwhile. */
static bool made_room_in_stream(const struct CUstream_st *stream, CUresult *result)
{
	uint32_t number = stream->number;
	uint64_t generation = stream->generation, enough = stream->sequence + 1 - QUEUE_DEPTH;

	if (stream->sequence + 1 <= QUEUE_DEPTH || sequence_done(number, generation, enough))
		return false;
	pthread_mutex_unlock(&ring_lock);
	*result = wait_until(sequence_done, number, generation, enough);
	pthread_mutex_lock(&ring_lock);
	return true;
}

static void put_on_stream(struct CUstream_st *stream, struct command *command)
{
	command->stream = stream->number;
	command->device = stream->context->device;
	command->sequence = ++stream->sequence;
	put(command);
}

CUresult ring_operation(struct CUstream_st *stream, uint32_t kind, const uint64_t arguments[4], struct point *at)
{
	struct command command = {.kind = kind,
				  .at_ns = clock_ns(),
				  .a = arguments[0],
				  .b = arguments[1],
				  .c = arguments[2],
				  .d = arguments[3]};
	CUresult result = call_begin();

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&ring_lock);
	while (result == CUDA_SUCCESS) {
		struct CUstream_st *awaited;

		if (made_room_in_stream(stream, &result) || made_room_in_ring(&result))
			continue;
		awaited = must_wait_for(stream);
		if (!awaited) {
			put_on_stream(stream, &command);
			break;
		}
		struct command wait = {
			.kind = CMD_WAIT, .at_ns = command.at_ns, .a = awaited->number, .b = awaited->sequence};

		note_wait(stream, awaited);
		put_on_stream(stream, &wait);
	}
	if (at)
		*at = (struct point){stream->number, stream->generation, stream->sequence};
	pthread_mutex_unlock(&ring_lock);
	call_end();
	return result;
}

struct point ring_last(struct CUstream_st *stream)
{
	struct point point;

	pthread_mutex_lock(&ring_lock);
	point = (struct point){stream->number, stream->generation, stream->sequence};
	pthread_mutex_unlock(&ring_lock);
	return point;
}

size_t ring_points(struct CUctx_st *context, struct point *points, size_t room)
{
	size_t count = 0;

	pthread_mutex_lock(&ring_lock);
	for (struct CUstream_st *s = context->streams; s && count < room; s = s->next)
		points[count++] = (struct point){s->number, s->generation, s->sequence};
	for (uint32_t n = 0; n < MAX_STREAMS && count < room; n++)
		if (numbers[n].ending && numbers[n].device == context->device)
			points[count++] = (struct point){n, atomic_load(&generations[n]), numbers[n].last};
	pthread_mutex_unlock(&ring_lock);
	return count;
}

/* ---- streams come and go; all with ring_lock until the exported ones ---- */

/* Keeps the lock throughout, so that no thread can end the context between the choice of a number and its CMD_STREAM_END. */
static void retire_drained(void)
{
	for (uint32_t n = 0; n < MAX_STREAMS && ring_has_room(head_now(), 0, 0); n++) {
		struct command command = {.kind = CMD_STREAM_END, .device = numbers[n].device, .stream = n};

		if (!numbers[n].ending || atomic_load(&connection.shared->completed[n]) < numbers[n].last)
			continue;
		command.at_ns = clock_ns();
		put(&command);
		numbers[n].ending = used[n] = false;
	}
}

static bool any_ending(uint32_t device)
{
	for (uint32_t n = 0; n < MAX_STREAMS; n++)
		if (numbers[n].ending && numbers[n].device == device)
			return true;
	return false;
}

static CUresult take_number(uint32_t *number)
{
	for (;;) {
		struct point oldest = {.stream = NO_STREAM};
		CUresult result;

		retire_drained();
		for (uint32_t n = 0; n < MAX_STREAMS; n++)
			if (!used[n]) {
				used[n] = true;
				*number = n;
				return CUDA_SUCCESS;
			} else if (numbers[n].ending) {
				oldest = (struct point){n, atomic_load(&generations[n]), numbers[n].last};
			}
		if (oldest.stream == NO_STREAM)
			return CUDA_ERROR_OUT_OF_MEMORY;
		pthread_mutex_unlock(&ring_lock);
		result = point_wait(oldest);
		pthread_mutex_lock(&ring_lock);
		if (result != CUDA_SUCCESS)
			return result;
	}
}

CUresult ring_stream_new(struct CUctx_st *context, unsigned flags, int priority, struct CUstream_st **out)
{
	struct CUstream_st *stream = calloc(1, sizeof(*stream));
	struct command command = {.kind = CMD_STREAM_NEW,
				  .device = context->device,
				  .at_ns = clock_ns(),
				  .a = (uint64_t)(int64_t)priority};
	CUresult result;

	if (!stream)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = call_begin();
	if (result != CUDA_SUCCESS) {
		free(stream);
		return result;
	}
	pthread_mutex_lock(&ring_lock);
	result = take_number(&command.stream);
	if (result == CUDA_SUCCESS) {
		*stream = (struct CUstream_st){.magic = MAGIC_STREAM,
					       .number = command.stream,
					       .context = context,
					       .flags = flags,
					       .priority = priority};
		/* The generation first: a thread that still looks at the old stream sees it as done, then the 0. */
		stream->generation = atomic_fetch_add(&generations[stream->number], 1) + 1;
		atomic_store(&connection.shared->completed[stream->number], 0);
		numbers[stream->number].device = context->device;
		result = put_plain(&command);
		if (result != CUDA_SUCCESS)
			used[stream->number] = false;
	}
	if (result == CUDA_SUCCESS) {
		stream->next = context->streams;
		context->streams = stream;
		*out = stream;
	}
	pthread_mutex_unlock(&ring_lock);
	call_end();
	if (result != CUDA_SUCCESS)
		free(stream);
	return result;
}

void ring_stream_end(struct CUstream_st *stream)
{
	struct CUstream_st **link;
	bool begun = call_begin() == CUDA_SUCCESS; /* without a server there is nothing to wait for */

	pthread_mutex_lock(&ring_lock);
	for (link = &stream->context->streams; *link && *link != stream; link = &(*link)->next)
		;
	if (*link)
		*link = stream->next;
	numbers[stream->number].ending = true;
	numbers[stream->number].last = stream->sequence;
	retire_drained();
	pthread_mutex_unlock(&ring_lock);
	if (begun)
		call_end();
	stream->magic = 0;
	free(stream);
}

void ring_streams_end(struct CUctx_st *context)
{
	struct point points[MAX_STREAMS];
	size_t count = ring_points(context, points, MAX_STREAMS);
	bool begun = call_begin() == CUDA_SUCCESS;

	for (size_t i = 0; i < count && point_wait(points[i]) == CUDA_SUCCESS; i++)
		;
	while (context->streams)
		ring_stream_end(context->streams);
	context->null = NULL;
	/* CMD_CONTEXT_END may come next, and the server knows none of the device's streams after it */
	pthread_mutex_lock(&ring_lock);
	while (ready() == CUDA_SUCCESS && any_ending(context->device)) {
		CUresult result = CUDA_SUCCESS;
		struct point last = {.stream = NO_STREAM};

		made_room_in_ring(&result);
		retire_drained();
		for (uint32_t n = 0; n < MAX_STREAMS; n++)
			if (numbers[n].ending && numbers[n].device == context->device)
				last = (struct point){n, atomic_load(&generations[n]), numbers[n].last};
		if (last.stream == NO_STREAM || result != CUDA_SUCCESS)
			break;
		pthread_mutex_unlock(&ring_lock);
		result = point_wait(last);
		pthread_mutex_lock(&ring_lock);
		if (result != CUDA_SUCCESS)
			break;
	}
	pthread_mutex_unlock(&ring_lock);
	if (begun)
		call_end();
}
