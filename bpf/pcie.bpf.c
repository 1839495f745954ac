// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "bounds.bpf.h"
#include "context.bpf.c"
#include "copy.bpf.h"
#include "graph.bpf.h"
#include "pace.bpf.c"
#include "stream.bpf.h"

#define NS_PER_SECOND 1000000000ull
#define LONGEST_COPY (1ull << 33) /* bytes × NS_PER_SECOND stay within 64 bits */
#define SLOWEST_LINK (1ull << 20) /* bytes per second: link times stay far from 64 bits */
/* A copy that blocks its caller ends when it returns. From pageable memory it lasts a few times its bytes' time. */
#define BLOCKING_FACTOR 4
#define BLOCKING_NS 50000ull
/* However much an online process says that it copies, the link is not shut for longer after its last copy. */
#define LONGEST_ONLINE_NS 100000000ull

enum copy_call {
	COPY_ENTERS = 1, /* the call has not run: its process may be stopped */
	COPY_BLOCKS = 2, /* it returns when the data has arrived */
};

static __always_inline struct link *link_at(__u32 index)
{
	return index < LINKS ? bpf_map_lookup_elem(&links, &index) : NULL;
}

static __always_inline __u64 link_ns(const struct link *link, __u64 bytes)
{
	__u64 speed = link->bytes_per_second > SLOWEST_LINK ? link->bytes_per_second : SLOWEST_LINK;

	return (bytes < LONGEST_COPY ? bytes : LONGEST_COPY) * NS_PER_SECOND / speed;
}

static __always_inline int is_same_process(const struct process_id *one, const struct process_id *other)
{
	return one->tgid == other->tgid && one->start_ticks == other->start_ticks;
}

/* An online copy begins. Of two CPUs that do this at once one may be forgotten: then it counts for too short. */
static __always_inline void note_online_copy(struct link *link, const struct process_id *id, __u64 stream, __u64 ns,
					     __u32 how, __u64 now)
{
	__u64 until = link->online_until_ns, blocked = now + ns * BLOCKING_FACTOR + BLOCKING_NS;

	if (until <= now) {
		link->online_process = *id;
		link->online_stream = stream;
		until = now;
	} else {
		if (!is_same_process(&link->online_process, id))
			link->online_process.tgid = 0;
		if (link->online_stream != stream)
			link->online_stream = 0;
	}
	if (!(how & COPY_BLOCKS))
		until += ns;
	else if (until < blocked)
		until = blocked;
	if (link->queued_until_ns > now) /* the offline copies under way get so much less of the link */
		__sync_fetch_and_add(&link->queued_until_ns, ns);
	link->online_at_ns = now;
	link->online_until_ns = until < now + LONGEST_ONLINE_NS ? until : now + LONGEST_ONLINE_NS;
}

/* True if something that the process copied there may still be under way. */
static __always_inline int end_on_link(__u32 index, const struct process_id *id, const struct awaited *awaited)
{
	struct link *link = link_at(index);
	__u64 now = bpf_ktime_get_ns();

	if (!link || link->online_until_ns <= now)
		return 0;
	if (!is_same_process(&link->online_process, id) || awaited->until_ns < link->online_at_ns)
		return 1;
	if (awaited->stream != STREAM_ANY && awaited->stream != link->online_stream)
		return 1;
	link->online_until_ns = now;
	if (link->waiting && !__sync_val_compare_and_swap(&link->free_posted, 0, 1))
		post_wake(&(struct wake){.kind = PAUSE_LINK_FREE, .slot = index});
	return 0;
}

/* A wait of an online process has returned: what it copied before, into the streams that it waited for, is done. */
static __always_inline void end_online_copies(const struct process_id *id, struct process *process,
					      const struct awaited *awaited)
{
	__u32 first = (process->copied - 1) * LINK_DIRECTIONS;
	int left = 0;

	if (!process->copied)
		return;
	for (__u32 direction = 0; direction < LINK_DIRECTIONS; direction++)
		left |= end_on_link(first + direction, id, awaited);
	if (!left)
		process->copied = 0;
}

/* What follows is verified once, not for each state of its callers: no inline functions. Places are of `copiers`. */

static __always_inline struct copier *copier_at(struct link *link, __u32 place)
{
	if (place >= MOST_COPIERS)
		return NULL;
	barrier_var(place); /* or clang leaves the mask out, and the verifier of Linux 6.1 sees no bound */
	return &link->copiers[place & (MOST_COPIERS - 1)];
}

/* MOST_COPIERS: the container has none. */
__noinline __u32 find_copier(__u32 index, __u32 group)
{
	struct link *link = link_at(index);

	if (!link)
		return MOST_COPIERS;
	for (__u32 i = 0; i < MOST_COPIERS; i++)
		if (link->copiers[i].group == group)
			return i;
	return MOST_COPIERS;
}

/* A free place, or that of a container that has not copied for long, given to this one. MOST_COPIERS: there is none. */
__noinline __u32 take_copier(__u32 index, __u32 group)
{
	struct link *link = link_at(index);
	__u64 now = bpf_ktime_get_ns();

	if (!link)
		return MOST_COPIERS;
	for (__u32 i = 0; i < MOST_COPIERS; i++) {
		struct copier *one = &link->copiers[i];
		__u32 before = one->group;

		if (before && less(now, one->until_ns) < NS_PER_SECOND)
			continue;
		if (__sync_val_compare_and_swap(&one->group, before, group) != before)
			continue;
		one->virtual_ns = 0;
		one->until_ns = 0;
		one->settled = 0;
		return i;
	}
	return MOST_COPIERS;
}

/* The one that has had least, of the others that copy. MOST_COPIERS: none does. */
__noinline __u32 least_copier(__u32 index, __u32 group, __u64 now)
{
	struct link *link = link_at(index);
	__u32 least = MOST_COPIERS;
	__u64 least_ns = ~0ull;

	if (!link)
		return MOST_COPIERS;
	for (__u32 i = 0; i < MOST_COPIERS; i++) {
		struct copier *one = &link->copiers[i];

		if (!one->group || one->group == group || one->until_ns <= now || one->virtual_ns >= least_ns)
			continue;
		least_ns = one->virtual_ns;
		least = i;
	}
	return least;
}

static __always_inline __u64 by_weight(__u64 ns, __u32 weight)
{
	return ns * WEIGHT_ONE / (weight ? weight : 1);
}

/* One whose copies had ended, and that now begins again, has saved nothing beyond what the others may be ahead. */
static __always_inline void catch_up(const struct link *link, struct copier *own, __u32 weight, __u64 now)
{
	__u64 least = less(link->virtual_ns, by_weight(LINK_LEAD_NS, weight));

	if (own->until_ns <= now && own->virtual_ns < least)
		own->virtual_ns = least;
}

static __always_inline void advance_link(struct link *link, __u64 least)
{
	__u64 before = link->virtual_ns;

	if (least > before)
		__sync_val_compare_and_swap(&link->virtual_ns, before, least);
}

/* Adds it to what is under way: what was before it, ns from now. */
static __always_inline __u64 queue_copy(struct link *link, __u64 ns, __u64 now)
{
	__u64 before = link->queued_until_ns, most = now + LINK_LONGEST_NS;

	if (before < now || before > most)
		__sync_val_compare_and_swap(&link->queued_until_ns, before, before < now ? now : most);
	return less(__sync_fetch_and_add(&link->queued_until_ns, ns), now);
}

/* Where few copies may be under way from now on. */
static __always_inline void settle_copier(struct link *link, struct copier *own, const struct rule *rule, __u64 now)
{
	__u32 is_short = rule->flags & RULE_SHORT ? 1 : 0;

	if (is_short && !own->settled)
		queue_copy(link, LINK_SETTLE_NS, now);
	own->settled = is_short;
}

/* Charges an offline copy to its container: whether it has to wait. */
__noinline int charge_copy(__u32 index, const struct rule *rule, __u64 ns)
{
	struct link *link = link_at(index);
	__u64 now = bpf_ktime_get_ns(), queued, ahead, least_ns = ~0ull;
	__u32 least_weight = WEIGHT_ONE;
	struct copier *own, *least;

	if (!link || !rule)
		return 0;
	own = copier_at(link, find_copier(index, rule->group));
	if (!own)
		own = copier_at(link, take_copier(index, rule->group));
	if (!own) {
		count_lost(LOST_PACE);
		return 0;
	}
	least = copier_at(link, least_copier(index, rule->group, now));
	if (least) {
		least_ns = least->virtual_ns;
		least_weight = least->weight;
	}
	catch_up(link, own, least_weight, now);
	own->weight = rule->weight;
	ahead = __sync_fetch_and_add(&own->virtual_ns, by_weight(ns, rule->weight));
	advance_link(link, least_ns < ahead ? least_ns : ahead);
	settle_copier(link, own, rule, now);
	queued = queue_copy(link, ns, now);
	own->until_ns = now + queued + 2 * ns;
	if (link->online_until_ns > now)
		return 1;
	if ((rule->flags & RULE_SHORT) && queued > LINK_QUEUE_NS)
		return 1;
	return ahead > least_ns && ahead - least_ns > by_weight(LINK_LEAD_NS, rule->weight);
}

static __always_inline void pace_offline_copy(const struct process_id *payer, const struct rule *rule, __u32 index,
					      __u64 ns, __u32 how, __u64 now)
{
	struct process_id id = this_process();
	struct verdict_on_launch verdict = {
		.slot = index / LINK_DIRECTIONS, .link = index, .estimate_ns = ns, .reason = PAUSE_COPY};
	struct thread *thread = this_thread();
	struct pace *pace = own_pace(payer);
	struct link *link = link_at(index);

	if (!pace)
		return;
	if (how & COPY_ENTERS)
		notice_foreign(&id, thread, pace, now);
	if (!charge_copy(index, rule, ns) || !(how & COPY_ENTERS) || !may_stop(now) || has_pass(payer, pace, ns))
		return;
	if (stop_launch(&id, thread, pace, rule, &verdict) && link) /* the guardian adds it when it lets it through */
		__sync_fetch_and_add(&link->queued_until_ns, -ns);
}

static __always_inline __u32 direction_of(const struct sized_copy *copy)
{
	if (!copy->source && !copy->destination)
		return copy->direction;
	return unified_direction(copy->destination, copy->source);
}

/*
 * A copy of the process that runs: whether it is one between host and device that is paced. No inline function: see
 * count_copy.
 */
__noinline int pace_copy(const struct sized_copy *copy, __u64 stream, __u32 how)
{
	struct process_id id = this_process(), payer = id;
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	__u64 now = bpf_ktime_get_ns(), ns;
	struct rule *rule = rule_of(&id, process, this_thread(), &payer, now);
	struct link *link;
	__u32 direction, slot, index;

	if (!copy || !rule || !(rule->flags & RULE_COPIES))
		return 0;
	direction = direction_of(copy);
	slot = slot_of(rule, current_device());
	if (direction >= LINK_DIRECTIONS || slot >= SLOTS || find_capture(&id, process, stream))
		return 0;
	index = slot * LINK_DIRECTIONS + direction;
	link = link_at(index);
	if (!link || !link->bytes_per_second)
		return 0;
	ns = link_ns(link, copy->bytes);
	if (rule->role == ROLE_OFFLINE) {
		pace_offline_copy(&payer, rule, index, ns, how, now);
	} else if (rule->role == ROLE_ONLINE) {
		note_online_copy(link, &id, stream, ns, how, now);
		if (process)
			process->copied = slot + 1;
	}
	return 1;
}
