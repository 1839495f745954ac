// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * An object of its own: loaded and attached only while some container's promise is about HTTP. Every system call of the
 * node that returns more than 0 pays one look-up then, and so does whatever arrives at a socket. Only returns are looked
 * at: a call's arguments are still there. What is known of requests is reported to the gates of the container's devices.
 */
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "gate.bpf.h"
#include "http.h"
#include "http_call.bpf.h"
#include "http_connection.h"
#include "http_socket.bpf.h"
#include "latency.bpf.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define HTTP_STEPS 8192 /* pieces of one call: eight bytes of a header, all of a body, an element of a vector */
#define HTTP_SHUT 4 /* TCP_FIN_WAIT1: we sent our last byte */
#define HTTP_SHUT_LATER 9 /* TCP_LAST_ACK: the same after the client did */
#define HTTP_GONE 7 /* TCP_CLOSE */
#define HTTP_TRIES 8 /* slots that are looked at before a connection with a request in service loses its own */

#define MAP(name, map_type, key_type, value_type, entries, flags)                                                      \
	struct {                                                                                                       \
		__uint(type, map_type);                                                                                \
		__uint(max_entries, entries);                                                                          \
		__uint(map_flags, flags);                                                                              \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

/* The bytes of one call, as far as they are not looked at yet. */
struct http_bytes {
	__u64 base;
	__u64 here; /* left at `base` */
	__u64 vector;
	__u64 vectors;
	__u64 left; /* in all */
	__u64 now;
	__u32 side;
	__u32 is_unreadable;
};

/* What a step needs. */
struct http_context {
	struct http_connection *connection;
	const struct http_watch *watch;
	struct http_bytes *bytes;
};

MAP(http_wanted, BPF_MAP_TYPE_HASH, __u32, struct http_follower, HTTP_WATCHES *HTTP_CHILDREN * 2, BPF_F_NO_PREALLOC);
MAP(http_watches, BPF_MAP_TYPE_ARRAY, __u32, struct http_watch, HTTP_WATCHES, 0);
MAP(http_latencies, BPF_MAP_TYPE_ARRAY, __u32, struct latency, HTTP_WATCHES, 0);
MAP(http_counts, BPF_MAP_TYPE_ARRAY, __u32, struct http_counts, HTTP_WATCHES, 0);
MAP(http_connections, BPF_MAP_TYPE_HASH, __u64, struct http_connection, HTTP_WATCHES *HTTP_SLOTS, BPF_F_NO_PREALLOC);
MAP(http_slots, BPF_MAP_TYPE_ARRAY, __u32, __u64, HTTP_WATCHES *HTTP_SLOTS, 0); /* keys of connections */
MAP(http_tallies, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, HTTP_TALLIES, 0);
MAP(http_scratch, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct http_bytes, 1, 0);
MAP(http_blank, BPF_MAP_TYPE_ARRAY, __u32, struct http_connection, 1, 0);
MAP(http_steps, BPF_MAP_TYPE_ARRAY, __u32, __u32, HTTP_STEPS, 0); /* its length is what counts */

/*
 * An index that was compared and is less than `most`, a power of two. The compiler leaves out a mask that changes nothing,
 * and the verifier of Linux 6.1 forgets what it has learned by comparing when the compiler puts the index on the stack.
 */
#define WITHIN(index, most)                                                                                            \
	({                                                                                                             \
		__u32 within_ = (index);                                                                               \
		barrier_var(within_);                                                                                  \
		within_ &((most)-1);                                                                                   \
	})

#define TALLY_PLACES 16
#define CLASS_PLACES 8
_Static_assert(HTTP_TALLIES <= TALLY_PLACES && HTTP_CLASSES <= CLASS_PLACES, "each index has a place");

static __always_inline void tally(__u32 index, __u64 count)
{
	__u64 *found = bpf_map_lookup_elem(&http_tallies, &index);

	if (found)
		*found += count;
}

static __always_inline void tally_for(__u32 watch, __u32 index, __u64 count)
{
	struct http_counts *counts = bpf_map_lookup_elem(&http_counts, &watch);

	tally(index, count);
	if (counts && index < HTTP_TALLIES)
		__sync_fetch_and_add(&counts->tallies[WITHIN(index, TALLY_PLACES)], count);
}

/* The guardian looks through all stops then, so nothing is missed. */
static __always_inline void count_lost_wake(void)
{
}

/* Global functions, as the next one: they are verified once, and need no room on the stack of those that call them. */
__noinline int count_at_gates(__u32 slots, __s64 change)
{
	for (__u32 slot = 0; change && slot < SLOTS; slot++) {
		if (slots >> slot & 1)
			count_served(slot, change);
	}
	return 0;
}

/* Only while its container is still the one that the place belongs to. */
static __always_inline const struct http_watch *watch_of(__u32 index, __u32 epoch)
{
	const struct http_watch *watch = bpf_map_lookup_elem(&http_watches, &index);

	return watch && epoch && watch->epoch == epoch ? watch : NULL;
}

/* A request was read that was not seen to arrive. */
__noinline int distrust_at_gates(__u32 slots)
{
	for (__u32 slot = 0; slot < SLOTS; slot++) {
		struct gate *gate = slots >> slot & 1 ? gate_of(slot) : NULL;

		if (gate)
			lose_trust(gate, TRUST_LOST);
	}
	return 0;
}

#define REPORTED(slots, served) ((__u64)(slots) << 32 | (served))

/* So many requests of the connection are known: the gates get the difference to what was reported before. */
static __always_inline void update_gates(struct http_connection *connection, __u32 slots, __u32 served)
{
	__u64 before = __sync_lock_test_and_set(&connection->reported, REPORTED(slots, served));
	__u32 old_slots = before >> 32, old = before;

	if (old_slots == slots) {
		count_at_gates(slots, (__s64)served - old);
	} else {
		count_at_gates(old_slots, -(__s64)old);
		count_at_gates(slots, served);
	}
}

/*
 * With the request whose bytes wait for a thread of the server to read them: a busy one may do that when it is done with
 * the request before. Of a connection that makes no sense any more, or that is not watched, nothing is known.
 */
static __always_inline __u32 known_requests(const struct http_connection *connection)
{
	__u32 served = http_in_service(connection);

	if (connection->closed || connection->astray || connection->is_shut ||
	    !watch_of(connection->watch, connection->epoch))
		return 0;
	return served ?: connection->arrived;
}

/*
 * Twice where something has changed meanwhile: the other side of the connection, or its end. An end after that reports
 * itself. A global function, too.
 */
__noinline int report_requests(struct http_connection *connection, __u32 slots)
{
	__u32 served;

	if (!connection)
		return 0;
	served = known_requests(connection);
	update_gates(connection, slots, served);
	if (known_requests(connection) != served)
		update_gates(connection, slots, known_requests(connection));
	return 0;
}

/* A call has read from the connection, to which these gates belong. */
__noinline int note_read(struct http_connection *connection, __u32 slots)
{
	__u32 whole;

	if (!connection)
		return 0;
	whole = http_whole(connection);
	if (whole != connection->whole && !connection->arrived) /* more such may wait at the server, not yet accepted */
		distrust_at_gates(slots);
	connection->whole = whole;
	connection->arrived = connection->request.phase != HTTP_IDLE || bytes_wait((struct sock *)connection->sock);
	return 0;
}

/* The connection ends, or is followed no more: its socket's address may be another one's. Marked before it is reported. */
static __always_inline void forget_connection(struct http_connection *connection, __u64 key)
{
	connection->closed = 1;
	bpf_map_delete_elem(&http_connections, &key);
	update_gates(connection, connection->reported >> 32, 0);
}

__noinline int forget(__u64 key)
{
	struct http_connection *connection = bpf_map_lookup_elem(&http_connections, &key);

	if (connection)
		forget_connection(connection, key);
	return 0;
}

/* No service gains by errors: they come fast, and say nothing of how long work takes. Whether it is a latency. */
static __always_inline int record(__u32 index, const struct http_watch *watch, const struct http_outcome *outcome)
{
	struct latency *latency = bpf_map_lookup_elem(&http_latencies, &index);
	struct http_counts *counts = bpf_map_lookup_elem(&http_counts, &index);
	__u64 service_ns = outcome->ended_ns - outcome->begun_ns;
	__u32 class = outcome->status_class;

	if (!latency || !counts || class >= HTTP_CLASSES)
		return 0;
	__sync_fetch_and_add(&counts->classes[WITHIN(class, CLASS_PLACES)], 1);
	if (!class || !(watch->classes >> class & 1))
		return 0;
	__sync_fetch_and_add(&counts->receive_ns, outcome->receive_us * 1000ull);
	__sync_fetch_and_add(&counts->head_ns, service_ns + outcome->body_us * 1000ull);
	__sync_fetch_and_add(&counts->first_byte_ns, outcome->answer_ns - outcome->begun_ns);
	__sync_fetch_and_add(&counts->service_ns, service_ns);
	add_latency(latency, service_ns);
	return 1;
}

/* Counts it, once. */
static __always_inline void settle(const struct http_connection *connection, struct http_outcome *outcome)
{
	const struct http_watch *watch = watch_of(connection->watch, connection->epoch);
	__u32 found = outcome->tally;

	outcome->tally = HTTP_TALLIES;
	if (found >= HTTP_TALLIES)
		return;
	if (!watch)
		tally(found, outcome->count);
	else if (found == HTTP_ANSWERED && !record(connection->watch, watch, outcome))
		tally_for(connection->watch, HTTP_OTHER_STATUS, outcome->count);
	else
		tally_for(connection->watch, found, outcome->count);
}

/* Whether what is in the slot may go; 0 only for a connection that is served, unless it `must`. */
static __always_inline int vacate(__u32 slot, __u64 key, int must)
{
	struct http_connection *connection = bpf_map_lookup_elem(&http_connections, &key);
	__u32 served;

	if (!connection || connection->slot != slot)
		return 1; /* it ended, or the socket's address is another connection's by now */
	served = http_in_service(connection);
	if (served && !must)
		return 0;
	if (served)
		tally_for(connection->watch, HTTP_EVICTED, served);
	forget(key);
	return 1;
}

/*
 * A port's connections share its slots, so that those of one cannot keep out another's, nor the idle ones of one client
 * the requests of others: an idle connection that lost its slot gets one again with its next request.
 */
static __always_inline int take_slot(__u32 watch, __u64 key, __u32 *slot)
{
	struct http_counts *counts = bpf_map_lookup_elem(&http_counts, &watch);

	for (int tries = 1; counts && tries <= HTTP_TRIES; tries++) {
		__u32 index = watch * HTTP_SLOTS + __sync_fetch_and_add(&counts->cursor, 1) % HTTP_SLOTS;
		__u64 *held = bpf_map_lookup_elem(&http_slots, &index);

		if (!held)
			return 0;
		if (*held && *held != key && !vacate(index, *held, tries == HTTP_TRIES))
			continue;
		*held = key;
		*slot = index;
		return 1;
	}
	return 0;
}

static __always_inline struct http_connection *open_connection(struct sock *sock, const struct http_follower *follower,
							       __u32 slots, int is_fresh)
{
	__u64 key = (__u64)sock;
	__u32 zero = 0, slot;
	struct http_connection *connection = bpf_map_lookup_elem(&http_blank, &zero);

	forget(key);
	if (!connection || !take_slot(follower->watch, key, &slot) ||
	    bpf_map_update_elem(&http_connections, &key, connection, BPF_ANY)) {
		tally_for(follower->watch, HTTP_NO_CONNECTION, 1);
		return NULL;
	}
	connection = bpf_map_lookup_elem(&http_connections, &key);
	if (connection) {
		connection->watch = follower->watch;
		connection->epoch = follower->epoch;
		connection->slot = slot;
		connection->sock = key;
		connection->reported = REPORTED(slots, 0);
		http_start(connection, is_fresh);
	}
	return connection;
}

static __always_inline struct http_connection *connection_of(struct sock *sock, const struct http_follower *follower,
							     __u32 slots)
{
	__u64 key = (__u64)sock;
	struct http_connection *connection = bpf_map_lookup_elem(&http_connections, &key);

	if (connection && connection->epoch == follower->epoch && connection->watch == follower->watch)
		return connection;
	return open_connection(sock, follower, slots, 0);
}

struct iovec {
	__u64 base;
	__u64 length;
};

static __always_inline int next_vector(struct http_bytes *bytes)
{
	struct iovec vector;

	if (!bytes->vectors || bpf_probe_read_user(&vector, sizeof(vector), (void *)bytes->vector)) {
		bytes->is_unreadable = 1;
		return 0;
	}
	bytes->vector += sizeof(vector);
	bytes->vectors--;
	bytes->base = vector.base;
	bytes->here = vector.length < bytes->left ? vector.length : bytes->left;
	return 1;
}

static __always_inline void advance(struct http_bytes *bytes, __u64 count)
{
	bytes->base += count;
	bytes->here -= count;
	bytes->left -= count;
}

static __always_inline int take_word(struct http_parser *parser, const struct http_watch *watch,
				     struct http_bytes *bytes, __u32 *event)
{
	__u64 word = 0;
	__u32 count = bytes->here < 8 ? bytes->here : 8;

	barrier_var(count); /* or the compiler leaves out what tells the verifier of Linux 6.1 the bound */
	if (count > 8 || bpf_probe_read_user(&word, count, (void *)bytes->base)) {
		bytes->is_unreadable = 1;
		return 0;
	}
	advance(bytes, http_take(parser, watch, word, count, event));
	return 1;
}

/* One piece; 1: there is no more to do. */
static long step(void *map, const __u32 *key, __u32 *value, struct http_context *context)
{
	struct http_bytes *bytes = context->bytes;
	struct http_connection *connection = context->connection;
	struct http_parser *parser = bytes->side == HTTP_READ ? &connection->request : &connection->answer;
	struct http_outcome outcome = {.tally = HTTP_TALLIES};
	__u64 passed;
	__u32 event;

	if (!bytes->left)
		return 1;
	if (!bytes->here)
		return !next_vector(bytes);
	passed = http_pass(parser, bytes->here, &event);
	if (passed)
		advance(bytes, passed);
	else if (!take_word(parser, context->watch, bytes, &event))
		return 1;
	if (!event)
		return 0;
	http_event(connection, bytes->side, event, bytes->now, &outcome);
	settle(connection, &outcome);
	if (!connection->closed && !connection->astray)
		return 0;
	bytes->left = 0;
	return 1;
}

/* Bytes that cannot be looked at may only be part of a body. */
static __always_inline void pass_opaque(struct http_context *context, struct http_outcome *outcome)
{
	struct http_connection *connection = context->connection;
	struct http_bytes *bytes = context->bytes;
	struct http_parser *parser = bytes->side == HTTP_READ ? &connection->request : &connection->answer;
	__u32 event;

	bytes->left -= http_pass(parser, bytes->left, &event);
	bytes->is_unreadable = 1;
	if (event) {
		http_event(connection, bytes->side, event, bytes->now, outcome);
		settle(connection, outcome);
	}
}

#define MESSAGE_VECTORS 16 /* offset of msg_iov in struct msghdr */

static __always_inline void find_bytes(struct http_bytes *bytes, const struct http_call *call, __u64 length)
{
	struct iovec vectors = {.base = call->memory, .length = call->count};

	*bytes = (struct http_bytes){.left = length, .side = call->side, .now = bpf_ktime_get_ns()};
	if (call->shape == HTTP_UNCOUNTED)
		bytes->left = HTTP_MOST_LEFT;
	if (call->shape == HTTP_BUFFER) {
		bytes->base = call->memory;
		bytes->here = length;
	}
	if (call->shape == HTTP_MESSAGE &&
	    bpf_probe_read_user(&vectors, sizeof(vectors), (void *)call->memory + MESSAGE_VECTORS))
		vectors.length = 0; /* without any, the first step finds the bytes unreadable */
	bytes->vector = vectors.base;
	bytes->vectors = vectors.length;
}

static __always_inline void look_through(struct http_context *context, const struct http_call *call,
					 struct http_outcome *outcome)
{
	struct http_bytes *bytes = context->bytes;

	if (call->shape == HTTP_OPAQUE || call->shape == HTTP_UNCOUNTED)
		pass_opaque(context, outcome);
	else
		bpf_for_each_map_elem(&http_steps, step, context, 0);
	if (!bytes->left)
		return;
	http_go_astray(context->connection, bytes->is_unreadable ? HTTP_UNREADABLE : HTTP_LONG, outcome);
}

static __always_inline void follow(struct http_connection *connection, const struct http_watch *watch,
				   const struct http_call *call, __u64 length)
{
	struct http_outcome outcome = {.tally = HTTP_TALLIES};
	struct http_context context = {.connection = connection, .watch = watch};
	__u32 zero = 0;
	int makes_sense;

	context.bytes = bpf_map_lookup_elem(&http_scratch, &zero);
	if (!context.bytes)
		return;
	find_bytes(context.bytes, call, length);
	makes_sense = http_enter(connection, call->side, context.bytes->now, &outcome);
	settle(connection, &outcome);
	if (!makes_sense)
		return;
	look_through(&context, call, &outcome);
	settle(connection, &outcome);
}

static __always_inline void note_call(const struct http_follower *follower, struct http_call *call, __u64 result)
{
	const struct http_watch *watch = watch_of(follower->watch, follower->epoch);
	struct http_connection *connection;
	struct sock *sock;

	if (!watch)
		return;
	sock = socket_at(call->shape == HTTP_ACCEPTS ? result : call->fd, watch->port);
	if (!sock && call->other_fd != HTTP_NO_FD) {
		sock = socket_at(call->other_fd, watch->port);
		call->side = HTTP_READ;
	}
	if (!sock)
		return;
	if (call->shape == HTTP_ACCEPTS) {
		open_connection(sock, follower, watch->slots, 1);
		return;
	}
	connection = connection_of(sock, follower, watch->slots);
	if (!connection)
		return;
	follow(connection, watch, call, result);
	if (call->side == HTTP_READ)
		note_read(connection, watch->slots);
	report_requests(connection, watch->slots);
}

SEC("raw_tp/sys_exit")
int http_call_returns(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;
	__s64 result = ctx->args[1];
	const struct http_follower *follower;
	struct http_arguments arguments;
	struct http_call call;

	if (result <= 0)
		return 0;
	follower = bpf_map_lookup_elem(&http_wanted, &tgid);
	if (!follower || !read_call_arguments(&arguments, (void *)ctx->args[0]))
		return 0;
	describe_call(&call, &arguments);
	if (call.shape != HTTP_NOTHING)
		note_call(follower, &call, result);
	return 0;
}

/* Of a connection that was accepted. From Linux 6.3 on: before, all requests come unseen, and no gate trusts them. */
SEC("raw_tp/sk_data_ready")
int http_bytes_arrive(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 key = ctx->args[0];
	struct http_connection *connection = bpf_map_lookup_elem(&http_connections, &key);

	if (!connection || !bytes_wait((struct sock *)key))
		return 0;
	connection->arrived = 1;
	report_requests(connection, connection->reported >> 32);
	return 0;
}

/* Also when the process just dies, and before the socket's address can be another's. */
SEC("raw_tp/inet_sock_set_state")
int http_state_changes(struct bpf_raw_tracepoint_args *ctx)
{
	__u64 key = ctx->args[0];
	int state = ctx->args[2];
	struct http_connection *connection = bpf_map_lookup_elem(&http_connections, &key);
	struct http_outcome outcome = {.tally = HTTP_TALLIES};

	if (!connection)
		return 0;
	if (state == HTTP_SHUT || state == HTTP_SHUT_LATER) {
		http_conclude(connection, &outcome);
		connection->is_shut = 1;
	}
	if (state == HTTP_GONE)
		http_abandon(connection, &outcome);
	settle(connection, &outcome);
	if (state == HTTP_GONE)
		forget_connection(connection, key);
	else
		report_requests(connection, connection->reported >> 32);
	return 0;
}

/* One child more or less of a watch; false where it has as many as it may. A watch that begins anew has none. */
static __always_inline int take_child(__u32 watch, __s64 change)
{
	struct http_counts *counts = bpf_map_lookup_elem(&http_counts, &watch);

	if (!counts || (change > 0 && counts->children >= HTTP_CHILDREN))
		return 0;
	__sync_fetch_and_add(&counts->children, change);
	return 1;
}

/* A server that forks for each connection is done with it before its process could be looked up. */
SEC("raw_tp/sched_process_fork")
int http_process_forks(struct bpf_raw_tracepoint_args *ctx)
{
	__u32 parent = bpf_get_current_pid_tgid() >> 32;
	struct task_struct *task = (void *)ctx->args[1];
	__u32 child = BPF_CORE_READ(task, tgid);
	struct http_follower *follower = bpf_map_lookup_elem(&http_wanted, &parent), copy;

	if (!follower || child == parent)
		return 0;
	copy = *follower;
	copy.is_child = 1;
	if (take_child(copy.watch, 1) && !bpf_map_update_elem(&http_wanted, &child, &copy, BPF_ANY))
		return 0;
	tally_for(copy.watch, HTTP_NO_PROCESS, 1);
	return 0;
}

SEC("raw_tp/sched_process_exit")
int http_process_exits(void *ctx)
{
	__u32 tgid = bpf_get_current_pid_tgid() >> 32;
	struct task_struct *task = (void *)bpf_get_current_task();
	struct http_follower *follower = bpf_map_lookup_elem(&http_wanted, &tgid), copy;

	if (!follower || BPF_CORE_READ(task, signal, live.counter) > 0)
		return 0;
	copy = *follower;
	if (!bpf_map_delete_elem(&http_wanted, &tgid) && copy.is_child)
		take_child(copy.watch, -1);
	return 0;
}
