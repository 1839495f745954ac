/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The gates of the devices: which online requests run there. Shared by the objects that see requests come and go. */
#pragma once
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>

#include "pace.h"

#define SHARED_ARRAY(name, value_type, entries)                                                                        \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_ARRAY);                                                                      \
		__uint(map_flags, BPF_F_MMAPABLE);                                                                     \
		__uint(max_entries, entries);                                                                          \
		__type(key, __u32);                                                                                    \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

#define RING(name, bytes)                                                                                              \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_RINGBUF);                                                                    \
		__uint(max_entries, bytes);                                                                            \
	} name SEC(".maps")

SHARED_ARRAY(gates, struct gate, SLOTS);
SHARED_ARRAY(controls, struct control, 1);
RING(pauses, 128 * 1024); /* a record of each process in `stops`, and some of each in `holding` */

/* A request that neither launches nor waits for so long counts as over: its wait may be one that we do not see. */
#define DEFAULT_HOLD_NS 20000000ull
/* And one that only waits, after so long: no count of ours may shut a gate for good. */
#define LONGEST_WAIT_HOLDS 100
/* A shorter gap between two requests is their service's own work: the second had been waiting for the first. */
#define STRETCH_GAP_NS 500000ll

static __always_inline struct control *get_control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&controls, &zero);
}

static __always_inline struct gate *gate_of(__u32 slot)
{
	return slot < SLOTS ? bpf_map_lookup_elem(&gates, &slot) : NULL;
}

/* When the online requests that run count as over, unless more is heard of them. */
static __always_inline __u64 busy_end(const struct gate *gate)
{
	struct control *control = get_control();
	__u64 hold = control && control->hold_ns ? control->hold_ns : DEFAULT_HOLD_NS;

	return gate->last_online_ns + (gate->in_wait > 0 ? hold * LONGEST_WAIT_HOLDS : hold);
}

static __always_inline int is_busy(const struct gate *gate, __u64 now)
{
	return gate->open > 0 && now < busy_end(gate);
}

/* How long the requests that are open have run. */
static __always_inline __u64 busy_for(const struct gate *gate, __u64 now)
{
	__u64 since = gate->busy_since_ns, end = busy_end(gate);

	if (now < end)
		end = now;
	return since && end > since ? end - since : 0;
}

/* Time so far that online requests ran on the device; grows only while they do. */
static __always_inline __u64 busy_total(const struct gate *gate, __u64 now)
{
	return gate->busy_total_ns + (gate->open > 0 ? busy_for(gate, now) : 0);
}

static __always_inline __u64 busy_total_of(__u32 slot, __u64 now)
{
	struct gate *gate = gate_of(slot);

	return gate ? busy_total(gate, now) : 0;
}

static __always_inline void count_lost_wake(void);

/* Wakes the guardian. Where the ring is full it looks through all stops. */
static __always_inline void post_wake(struct wake *wake)
{
	struct control *control = get_control();

	if (!bpf_ringbuf_output(&pauses, wake, sizeof(*wake), 0))
		return;
	count_lost_wake();
	if (control)
		__sync_fetch_and_add(&control->wakes_lost, 1);
}

/* Whether one that is not seen is not there. */
static __always_inline int sees_requests(const struct gate *gate)
{
	return gate->trust >= TRUSTED;
}

/* A request runs, or one that launches any moment has arrived: the service's own work before that is short, or no reason. */
static __always_inline int is_shut(const struct gate *gate, __u64 now)
{
	__u64 since = gate->served_ns > gate->last_free_ns ? gate->served_ns : gate->last_free_ns;

	if (is_busy(gate, now))
		return 1;
	return gate->served > 0 && sees_requests(gate) && (__s64)(now - since) < (__s64)ANNOUNCED_NS;
}

static __always_inline void gain_trust(struct gate *gate)
{
	__u64 trust = gate->trust;

	gate->trust = trust < TRUST_MOST ? trust + 1 : TRUST_MOST;
}

static __always_inline void lose_trust(struct gate *gate, __u64 lost)
{
	__u64 trust = gate->trust;

	gate->trust = trust > lost ? trust - lost : 0;
}

/* Clients that ask again as soon as they are answered are waited for. */
static __always_inline void learn_haste(struct gate *gate, __u64 now)
{
	__u64 hasty = gate->hasty;
	__u64 one = (__s64)(now - gate->idle_ns) < (__s64)HASTY_NS ? HASTY_ALWAYS : 0;

	gate->hasty = (hasty * (HASTY_WEIGHT - 1) + one) / HASTY_WEIGHT;
}

/* Nothing is left that those who wait at the gate wait for. */
static __always_inline void post_free(struct gate *gate, __u32 slot)
{
	if (gate->waiting && !__sync_val_compare_and_swap(&gate->free_posted, 0, 1))
		post_wake(&(struct wake){.kind = PAUSE_FREE, .slot = slot});
}

/* So many requests more are in service, or less. */
static __always_inline void count_served(__u32 slot, __s64 change)
{
	struct gate *gate = gate_of(slot);
	__u64 now = bpf_ktime_get_ns();
	__s64 before;

	if (!gate)
		return;
	if (change > 0 && gate->served <= 0) { /* before they count: who launches looks how long ago that was */
		gate->served_ns = now;
		learn_haste(gate, now);
	}
	before = __sync_fetch_and_add(&gate->served, change);
	if (change > 0 || before + change > 0)
		return;
	gate->idle_ns = now;
	if (gate->open > 0)
		return;
	if (gate->last_online_ns < gate->served_ns)
		lose_trust(gate, TRUST_LOST_IDLE);
	if (sees_requests(gate)) /* else the end of the GPU work did */
		post_free(gate, slot);
}

/* An online thread's first launch since its last drained wait. */
static __always_inline void open_gate_request(__u32 slot, __u64 now)
{
	struct gate *gate = gate_of(slot);

	if (!gate)
		return;
	if (__sync_fetch_and_add(&gate->open, 1) > 0)
		return;
	gate->busy_since_ns = now;
	__sync_fetch_and_add(&gate->requests, 1);
	if (gate->served > 0)
		gain_trust(gate);
	else
		lose_trust(gate, TRUST_LOST);
	if ((__s64)(now - gate->last_free_ns) > STRETCH_GAP_NS) /* it may just have been freed, after `now` */
		gate->stretch_since_ns = now;
}

/* More is heard of the open requests. If they counted as over they go on from here: the time between was none of theirs. */
static __always_inline void revive_requests(struct gate *gate, __u64 now)
{
	__u64 since = gate->busy_since_ns, ran = busy_for(gate, now);

	if (gate->open <= 0 || is_busy(gate, now))
		return;
	if (__sync_val_compare_and_swap(&gate->busy_since_ns, since, now) == since) {
		__sync_fetch_and_add(&gate->busy_total_ns, ran);
		gate->stretch_since_ns = now;
		if (ran) /* else it has just begun, and found the device free */
			__sync_fetch_and_add(&gate->requests, 1);
	}
}

/* `count` online requests are over. The last one frees the device. */
static __always_inline void close_gate_requests(__u32 slot, __s64 count, __u64 now)
{
	struct gate *gate = gate_of(slot);
	__s64 before;

	if (!gate || count <= 0)
		return;
	gate->last_free_ns = now; /* before it is free: who comes next looks how long ago that was */
	before = __sync_fetch_and_add(&gate->open, -count);
	if (before > count || before <= 0)
		return;
	gate->busy_total_ns += busy_for(gate, now);
	gate->busy_since_ns = 0;
	post_free(gate, slot);
}

/* An online thread enters (+1) or leaves (−1) a wait. */
static __always_inline void count_waiting(__u32 slot, __s64 change)
{
	struct gate *gate = gate_of(slot);
	__u64 now = bpf_ktime_get_ns();

	if (!gate)
		return;
	if (change > 0)
		revive_requests(gate, now);
	else if (is_busy(gate, now))
		gate->last_online_ns = now; /* the wait was part of the request, however long it was */
	__sync_fetch_and_add(&gate->in_wait, change);
}
