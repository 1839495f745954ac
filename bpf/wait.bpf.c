// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "latency.bpf.h"
#include "maps.bpf.h"
#include "pace.bpf.c"
#include "pcie.bpf.c"
#include "process.bpf.h"
#include "stream.bpf.h"
#include "turn.bpf.c"

static __always_inline void record_latency(const struct process_id *id, __u64 ns)
{
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);
	struct latency *latency;

	if (!blank)
		return;
	latency = find_or_add(&latencies, id, &blank->latency, LOST_LATENCY);
	if (latency)
		add_latency(latency, ns);
}

/* Counts a launch among those of the stretch that a delivery will tell of. */
static __always_inline void note_function(struct process *process, __u64 function)
{
#pragma unroll
	for (int i = 0; i < DELIVERED_FUNCTIONS; i++) {
		struct delivered_function *one = &process->functions[i];

		if (one->launches && one->function != function)
			continue;
		one->function = function;
		one->launches++;
		return;
	}
}

static __always_inline void forget_functions(struct process *process)
{
#pragma unroll
	for (int i = 0; i < DELIVERED_FUNCTIONS; i++)
		process->functions[i].launches = 0;
}

/* Read anew for each slot: of a copy the verifier would follow every combination of bits. */
static __always_inline __u32 slots_from(const __u16 *mask, __u32 slot)
{
	return *(const volatile __u16 *)mask >> slot;
}

/* The thread enters (+1) or leaves (−1) a wait for work of its slots. */
__noinline int count_waits(int change)
{
	struct thread *thread = this_thread();

	if (!thread)
		return 0;
	for (__u32 slot = 0; slot < SLOTS && slots_from(&thread->in_gates, slot); slot++)
		if (slots_from(&thread->in_gates, slot) & 1)
			count_waiting(slot, change);
	return 0;
}

/* Where it was counted: the process may have launched elsewhere since, or have another rule. */
static __always_inline void leave_gate(struct thread *thread)
{
	if (!thread->in_gates)
		return;
	count_waits(-1);
	thread->in_gates = 0;
}

static __always_inline void end_spin(struct thread *thread)
{
	if (!thread->spins)
		return;
	thread->spins = 0;
	thread->wait_ns = 0;
	leave_gate(thread);
}

#define CLAIM_TRIES 16 /* each fails only where another CPU's succeeded */

static __always_inline __u32 open_of(const struct process *process)
{
	return process->requests;
}

static __always_inline __u32 epoch_of(const struct process *process)
{
	return process->requests >> 32;
}

/* Ends one request of an epoch: how many were open; 0: it is over already. */
static __always_inline __u32 take_one(struct process *process, __u32 epoch)
{
	__u64 seen = process->requests, found;

	for (int i = 0; i < CLAIM_TRIES; i++) {
		if (seen >> 32 != epoch || !(__u32)seen)
			return 0;
		found = __sync_val_compare_and_swap(&process->requests, seen, seen - 1);
		if (found == seen)
			return seen;
		seen = found;
	}
	return 0;
}

/* Ends all: how many were open. */
static __always_inline __u32 take_all(struct process *process)
{
	__u64 seen = process->requests, found;

	for (int i = 0; i < CLAIM_TRIES; i++) {
		if (!(__u32)seen)
			return 0;
		found = __sync_val_compare_and_swap(&process->requests, seen, ((seen >> 32) + 1) << 32);
		if (found == seen)
			return seen;
		seen = found;
	}
	return 0;
}

static __always_inline int take_gated(struct process *process, __u32 slot)
{
	__s32 *count, seen, found;

	barrier_var(slot); /* else the mask is optimised away, and 6.1 does not remember why it could be */
	count = &process->gated[slot & (SLOTS - 1)];
	seen = *count;
	for (int i = 0; i < CLAIM_TRIES; i++) {
		if (seen <= 0)
			return 0;
		found = __sync_val_compare_and_swap(count, seen, seen - 1);
		if (found == seen)
			return 1;
		seen = found;
	}
	return 0;
}

/* The thread's request is over, as far as gates count it. Verified once, not at each call. */
__noinline int close_own_gates(__u64 now)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	struct thread *thread = this_thread();

	if (!process || !thread)
		return 0;
	for (__u32 slot = 0; slot < SLOTS && slots_from(&thread->gates, slot); slot++)
		if (slots_from(&thread->gates, slot) & 1 && take_gated(process, slot))
			close_gate_requests(slot, 1, now);
	thread->gates = 0;
	return 0;
}

static __always_inline int has_request(const struct process *process, const struct thread *thread)
{
	return thread->open && thread->epoch == epoch_of(process);
}

/* The thread's request launches on this device: whether for the first time. */
static __always_inline int open_own_gate(struct process *process, struct thread *thread, __u32 slot, __u64 now)
{
	if (slot >= SLOTS || thread->gates >> slot & 1)
		return 0;
	thread->gates |= 1 << slot;
	open_gate_request(slot, now);
	barrier_var(slot); /* as in take_gated */
	__sync_fetch_and_add(&process->gated[slot & (SLOTS - 1)], 1);
	return 1;
}

/* Every request of the process is over. */
static __always_inline void close_all_gates(struct process *process, __u64 now)
{
	for (__u32 slot = 0; slot < SLOTS; slot++) {
		__s32 count = __sync_lock_test_and_set(&process->gated[slot], 0);

		if (count > 0)
			close_gate_requests(slot, count, now);
	}
}

/* Bookkeeping of requests at a launch: opens the thread's and the process's. */
static __always_inline void open_request(struct process *process, struct thread *thread, const struct rule *rule,
					 __u32 slot, __u64 function, __u64 now)
{
	struct gate *gate = takes_gate(rule) ? gate_of(slot) : NULL;

	if (thread)
		end_spin(thread); /* it asked, and went on without waiting */
	process->last_launch_ns = now;
	process->slot = slot;
	if (process->start_ns == 0) {
		process->start_ns = now;
		process->busy_mark_ns = busy_total_of(slot, now);
		process->launches = 0;
		process->charged_ns = 0;
		forget_functions(process);
		forget_streams(&process->streams);
	}
	process->launches++;
	note_function(process, function);
	if (thread && !has_request(process, thread)) {
		thread->start_ns = now;
		thread->gates = 0;
		forget_streams(&thread->streams);
		if (gate) /* before the request: a wait that ends all of them meanwhile leaves nothing at the gate */
			open_own_gate(process, thread, slot, now);
		thread->epoch = __sync_fetch_and_add(&process->requests, 1) >> 32;
		thread->open = 1;
	} else if (thread && gate) {
		int opened = open_own_gate(process, thread, slot, now);

		if (opened && !has_request(process, thread) && take_gated(process, slot))
			close_gate_requests(slot, 1, now); /* such a wait came before, and has not seen it */
	}
	if (gate) {
		revive_requests(gate, now);
		gate->last_online_ns = now;
	}
}

static __always_inline __u64 pauses_of(const struct process_id *id)
{
	struct pace *pace = bpf_map_lookup_elem(&paces, id);

	return pace ? pace->pauses : 0;
}

/* Busy totals are read while other CPUs book: the later one may be a little less. */
static __always_inline __u64 grown(__u64 now, __u64 before)
{
	return now > before ? now - before : 0;
}

static __always_inline void record_delivery(const struct process_id *id, struct process *process,
					    const struct thread *thread, int is_online, __u64 now)
{
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);
	struct deliveries *all;
	struct delivery *delivery;
	__u64 busy = busy_total_of(process->slot, now);
	__u64 pauses = pauses_of(id);

	if (!blank || !process->start_ns) /* began while another thread ended the last one: when is unknown */
		return;
	all = find_or_add(&delivered, id, &blank->deliveries, LOST_LATENCY);
	if (!all)
		return;
	delivery = &all->ring[all->count & (DELIVERIES - 1)];
	delivery->at_ns = now;
	delivery->launches = process->launches;
	delivery->charged_ns = process->charged_ns;
	delivery->queued_ns = thread->wait_queued_ns;
	delivery->waited_ns = now - thread->wait_ns;
	delivery->waited_busy_ns = is_online ? 0 : grown(busy, thread->wait_busy_mark_ns);
	delivery->elapsed_ns = now - process->start_ns;
	delivery->elapsed_busy_ns = is_online ? 0 : grown(busy, process->busy_mark_ns);
	delivery->pauses = pauses - process->pauses_mark;
	process->pauses_mark = pauses;
	__builtin_memcpy(delivery->functions, process->functions, sizeof(delivery->functions));
	all->count++;
}

/* For what this stream was given up to then. */
static __always_inline void begin_wait(const struct process_id *id, struct process *process, struct thread *thread,
				       __u64 stream, __u64 until_ns)
{
	__u64 now = bpf_ktime_get_ns();
	struct pace *pace = bpf_map_lookup_elem(&paces, id);
	struct rule *rule = own_rule(id, thread, now);
	__u64 busy = busy_total_of(process->slot, now), backlog;

	if (takes_gate(rule) && open_of(process) && !thread->in_gates && process->slot < SLOTS) {
		thread->in_gates = has_request(process, thread) && thread->gates ? thread->gates : 1 << process->slot;
		count_waits(1);
	}
	thread->awaited.stream = stream;
	thread->awaited.until_ns = until_ns;
	thread->wait_ns = now;
	thread->wait_busy_mark_ns = busy;
	backlog = pace && rule ? drained_backlog(queue_of(pace, process->slot), rule, busy, now) : 0;
	/* behind a soft gate the backlog also holds what was waited for long ago */
	thread->wait_queued_ns = backlog < process->charged_ns ? backlog : process->charged_ns;
}

/* Ends the thread's own request: how many were open; 0: it has none, or another thread's wait ended it. */
static __always_inline __u32 end_own(struct process *process, struct thread *thread, __u64 now)
{
	__u32 before = thread->open ? take_one(process, thread->epoch) : 0;

	if (before) {
		thread->open = 0;
		if (thread->gates)
			close_own_gates(now);
	}
	return before;
}

/*
 * Which requests a returned wait ends: the thread's own; or, for a thread that launched nothing itself, those of all
 * threads. A delivery is over whenever nothing is left of what the process launched: PyTorch's autograd thread, which
 * launches the backward pass, never waits, so its request stays open while the main thread's come and go.
 */
static __always_inline void end_requests(const struct process_id *id, struct process *process, struct thread *thread,
					 const struct rule *rule, __u64 now)
{
	__u64 start_ns = thread->start_ns;
	int all = drain(thread->awaited.stream, thread->awaited.until_ns, 1);
	int own = drain(thread->awaited.stream, thread->awaited.until_ns, 0);
	int is_open = has_request(process, thread);
	__u32 before;

	if (!own && is_open)
		return; /* of its own work some is in other streams */
	before = end_own(process, thread, now);
	if (!before) {
		if (!all || process->last_launch_ns >= thread->awaited.until_ns)
			return; /* others launched meanwhile, or elsewhere: nothing is known to be drained */
		start_ns = process->start_ns;
		if (!take_all(process))
			return;
		close_all_gates(process, now);
		before = 1;
	}
	if (before == 1 || (all && process->last_launch_ns < thread->awaited.until_ns)) {
		if (process->in_turns)
			end_periodic();
		record_delivery(id, process, thread, takes_gate(rule), now);
		settle_queue(id, rule, process->slot, now);
		process->start_ns = 0;
	}
	if (start_ns)
		record_latency(id, now - start_ns);
}

static __always_inline void end_wait(const struct process_id *id, struct process *process, int succeeded)
{
	struct thread *thread = this_thread();
	__u64 now = bpf_ktime_get_ns();

	if (!thread || !thread->wait_ns)
		return;
	leave_gate(thread);
	if (succeeded && process->copied)
		end_online_copies(id, process, &thread->awaited);
	if (succeeded && open_of(process))
		end_requests(id, process, thread, own_rule(id, thread, now), now);
	thread->wait_ns = 0;
	thread->spins = 0;
}

/* What the call waits for, or asks about. Of an event that was recorded before the probes were there nothing is known. */
static __always_inline void awaited_by(struct pt_regs *ctx, __u64 cookie, const struct process_id *id,
				       struct awaited *awaited)
{
	struct graph_key key = {.process = *id, .handle = PT_REGS_PARM1(ctx)};
	struct event_record *event;

	awaited->stream = STREAM_ANY;
	awaited->until_ns = bpf_ktime_get_ns();
	if (COOKIE_SHAPE(cookie) == WAIT_STREAM)
		awaited->stream = stream_named(key.handle, cookie);
	if (COOKIE_SHAPE(cookie) != WAIT_EVENT)
		return;
	event = bpf_map_lookup_elem(&recorded_events, &key);
	awaited->stream = event ? event->stream : 0;
	awaited->until_ns = event ? event->at_ns : 0;
}

PROBE("uprobe", wait_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	struct thread *thread = own_thread();
	struct awaited awaited = {};

	if (is_duplicate_of(thread, ctx, cookie))
		return 0;
	awaited_by(ctx, cookie, &id, &awaited);
	if (process && thread)
		begin_wait(&id, process, thread, awaited.stream, awaited.until_ns);
	return 0;
}

PROBE("uretprobe", wait_return)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);

	if (process)
		end_wait(&id, process, succeeded(ctx));
	return 0;
}

#define NOT_READY 600 /* CUDA_ERROR_NOT_READY */

/*
 * cuStreamQuery and cuEventQuery: asked over and over they are a wait, which ends when the answer is yes. A yes to the
 * first question says nothing: an allocator looks through old events in this way, while newer work runs.
 */
PROBE("uprobe", query_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	struct thread *thread = own_thread();

	if (is_duplicate_of(thread, ctx, cookie) || !process || !open_of(process))
		return 0;
	if (thread)
		awaited_by(ctx, cookie, &id, &thread->awaited);
	return 0;
}

PROBE("uretprobe", query_return)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	struct thread *thread = this_thread();
	__u64 answer = PT_REGS_RC(ctx);

	if (!process)
		return 0;
	if ((__u32)answer == NOT_READY && open_of(process) && thread && !thread->wait_ns) {
		begin_wait(&id, process, thread, thread->awaited.stream, thread->awaited.until_ns);
		thread->spins = 1;
	} else if ((__u32)answer == 0 && thread && thread->spins) {
		end_wait(&id, process, 1); /* of any thread's request: another one may have ended its own */
	}
	return 0;
}
