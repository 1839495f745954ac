// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "pace.bpf.c"
#include "turn.h"

static __always_inline __u64 owner_of(const struct process_id *id)
{
	return (__u64)id->start_ticks << 32 | id->tgid;
}

static __always_inline struct turn *turn_of(__u32 slot)
{
	return slot < SLOTS ? bpf_map_lookup_elem(&turns, &slot) : NULL;
}

/* False when another request has the turn, or waits for it: the guardian knows whose deadline is the earliest. */
static __always_inline int take_turn(struct turn *turn, __u64 own, __u64 until_ns, __u64 now)
{
	__u64 seen = turn->owner;

	if (seen != own && (seen || turn->waiting))
		return 0;
	if (__sync_val_compare_and_swap(&turn->owner, seen, own) != seen)
		return 0;
	turn->since_ns = now;
	turn->until_ns = until_ns;
	return 1;
}

/*
 * A periodic process's request begins, with the launch that runs now: stops the process until its turn. Nothing is
 * stopped later in the request. No inline function: other launches are not to pay for its stack.
 */
__noinline int begin_periodic(__u32 slot)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	struct rule *rule = bpf_map_lookup_elem(&rules, &id);
	struct turn *turn = turn_of(slot);
	struct verdict_on_launch verdict = {.slot = slot, .reason = PAUSE_TURN};
	struct thread *thread = this_thread();
	struct pace *pace;
	__u64 begun;

	if (!process || !rule)
		return 0;
	begun = process->start_ns;
	process->in_turns = 1;
	pace = own_pace(&id);
	if (!turn || !pace)
		return 0;
	notice_foreign(&id, thread, pace, begun);
	if (take_turn(turn, owner_of(&id), begun + rule->deadline_ns, begun) || !may_stop(begun))
		return 0;
	verdict.due_ns = begun + rule->deadline_ns;
	stop_launch(&id, thread, pace, rule, &verdict);
	return 0;
}

/* Whatever turns the process has others may have now. When it got one; 0: it had none. */
static __always_inline __u64 give_turns_back(const struct process_id *id)
{
	__u64 own = owner_of(id), since = 0;

	for (__u32 slot = 0; slot < SLOTS; slot++) {
		struct turn *turn = turn_of(slot);

		if (!turn || turn->owner != own)
			continue;
		since = turn->since_ns;
		if (__sync_val_compare_and_swap(&turn->owner, own, 0) == own && turn->waiting)
			post_wake(&(struct wake){.kind = PAUSE_FREE, .slot = slot});
	}
	return since;
}

static __always_inline void count_request(const struct process_id *id, __u64 due, __u64 since, __u64 now)
{
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);
	struct periodic *all = blank ? find_or_add(&periodics, id, &blank->periodic, LOST_PACE) : NULL;

	if (!all)
		return;
	if (since) {
		all->served_ns[all->served & (SERVED - 1)] = less(now, since);
		all->served++;
	}
	if (now > due) {
		all->misses++;
		if (now - due > all->worst_late_ns)
			all->worst_late_ns = now - due;
	}
	all->requests++; /* last: misses are never more */
}

/* The process has waited for all that its request launched. No inline function: as above. */
__noinline int end_periodic(void)
{
	struct process_id id = this_process();
	struct process *process = bpf_map_lookup_elem(&processes, &id);
	struct rule *rule = bpf_map_lookup_elem(&rules, &id);
	__u64 now = bpf_ktime_get_ns(), since = give_turns_back(&id);

	if (!process)
		return 0;
	process->in_turns = 0;
	if (!rule || rule->role != ROLE_PERIODIC || !process->start_ns)
		return 0;
	count_request(&id, process->start_ns + rule->deadline_ns, since, now);
	if (since)
		process->start_ns = since; /* what it was delivered did not begin before */
	return 0;
}

/* The process's request will not end: those who launched it are gone. */
static __always_inline void abandon_request(struct process *process)
{
	process->start_ns = 0;
	if (process->in_turns)
		end_periodic();
}

/* The process ends. Without its record in `stops` the guardian gives it no turn. */
static __always_inline void leave_turns(const struct process_id *id, struct process *process)
{
	struct rule *rule = bpf_map_lookup_elem(&rules, id);

	if (rule && rule->role == ROLE_PERIODIC)
		bpf_map_delete_elem(&stops, id);
	abandon_request(process);
}
