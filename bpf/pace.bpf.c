// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "maps.bpf.h"

/* A request that neither launches nor waits for so long counts as over: its wait may be one that we do not see. */
#define DEFAULT_HOLD_NS 20000000ull
/* And one that only waits, after so long: no count of ours may shut a gate for good. */
#define LONGEST_WAIT_HOLDS 100

static __always_inline struct control *get_control(void)
{
	__u32 zero = 0;

	return bpf_map_lookup_elem(&controls, &zero);
}

static __always_inline struct gate *gate_of(__u32 slot)
{
	return slot < SLOTS ? bpf_map_lookup_elem(&gates, &slot) : NULL;
}

static __always_inline __u32 slot_of(const struct rule *rule, __u32 device)
{
	return device < ORDINALS ? rule->slots[device & (ORDINALS - 1)] : rule->slot_unknown;
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

static __always_inline void post_pause(struct pause *pause)
{
	pause->at_ns = bpf_ktime_get_ns();
	if (bpf_ringbuf_output(&pauses, pause, sizeof(*pause), 0))
		count_lost(LOST_EVENT);
}

/* An online thread's first launch since its last drained wait. */
static __always_inline void open_gate_request(__u32 slot, __u64 now)
{
	struct gate *gate = gate_of(slot);

	if (!gate)
		return;
	if (__sync_fetch_and_add(&gate->open, 1) <= 0)
		gate->busy_since_ns = now;
}

/* More is heard of the open requests. If they counted as over they go on from here: the time between was nobody's. */
static __always_inline void revive_requests(struct gate *gate, __u64 now)
{
	__u64 since = gate->busy_since_ns, ran = busy_for(gate, now);

	if (gate->open <= 0 || is_busy(gate, now))
		return;
	if (__sync_val_compare_and_swap(&gate->busy_since_ns, since, now) == since)
		__sync_fetch_and_add(&gate->busy_total_ns, ran);
}

/* `count` online requests are over. The last one frees the device. */
static __always_inline void close_gate_requests(__u32 slot, __s64 count, __u64 now)
{
	struct gate *gate = gate_of(slot);
	__s64 before;

	if (!gate || count <= 0)
		return;
	before = __sync_fetch_and_add(&gate->open, -count);
	if (before > count || before <= 0)
		return;
	gate->busy_total_ns += busy_for(gate, now);
	gate->busy_since_ns = 0;
	gate->last_free_ns = now;
	if (gate->waiting)
		post_pause(&(struct pause){.kind = PAUSE_FREE, .slot = slot});
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

/* What is left of the virtual queue now. */
static __always_inline __u64 drained_queue(const struct pace *pace, const struct rule *rule, __u64 busy, __u64 now)
{
	__u64 elapsed = now > pace->updated_ns ? now - pace->updated_ns : 0;
	__u64 online = busy > pace->busy_mark_ns ? busy - pace->busy_mark_ns : 0;
	__u64 gone;

	if ((rule->flags & RULE_GATE) && online < elapsed)
		elapsed -= online;
	else if (rule->flags & RULE_GATE)
		elapsed = 0;
	if (elapsed > 1000000000ull)
		return 0;
	gone = elapsed * rule->rate_ppm / PPM;
	return gone < pace->queued_ns ? pace->queued_ns - gone : 0;
}

/* Whether the guardian and the agent live. */
static __always_inline int is_leased(__u64 now)
{
	struct control *control = get_control();

	return control && control->lease_until_ns >= now;
}

static __always_inline int may_stop(const struct process_id *id, __u64 now)
{
	struct resume *resume;

	if (!is_leased(now))
		return 0;
	resume = bpf_map_lookup_elem(&resumes, id);
	return !resume || resume->pass_until_ns < now;
}

/* Charges one launch to an offline process and stops the process if that is too much, or the device is taken. */
static __always_inline void pace_launch(const struct process_id *id, struct process *process, const struct rule *rule,
					__u32 slot, __u64 now)
{
	struct pace initial = {.updated_ns = now};
	struct pace *pace = find_or_add(&paces, id, &initial, LOST_PROCESS);
	struct gate *gate = gate_of(slot);
	__u64 estimate = rule->launch_ns;
	__u64 busy = gate ? busy_total(gate, now) : 0;
	__u64 queued;
	__u32 reason = 0;

	if (!pace)
		return;
	queued = drained_queue(pace, rule, busy, now);
	pace->queued_ns = queued + estimate;
	pace->updated_ns = now;
	pace->busy_mark_ns = busy;
	pace->charged_ns += estimate;
	process->charged_ns += estimate;
	if ((rule->flags & RULE_GATE) && gate && is_busy(gate, now))
		reason = PAUSE_GATE;
	else if ((rule->flags & RULE_PACE) && queued > 0 && queued + estimate > rule->max_queued_ns)
		reason = PAUSE_QUEUE;
	if (!reason || !may_stop(id, now))
		return;
	if (bpf_send_signal(SIGSTOP))
		return;
	pace->pauses++;
	if (reason == PAUSE_GATE)
		pace->gate_pauses++;
	post_pause(&(struct pause){.kind = PAUSE_STOPPED,
				   .reason = reason,
				   .process = *id,
				   .slot = slot,
				   .queued_ns = queued,
				   .estimate_ns = estimate,
				   .rule = *rule});
}

/* The process has waited everything out: its virtual queue is empty, whatever the estimates said. */
static __always_inline void empty_queue(const struct process_id *id, __u32 slot, __u64 now)
{
	struct pace *pace = bpf_map_lookup_elem(&paces, id);

	if (!pace)
		return;
	pace->queued_ns = 0;
	pace->updated_ns = now;
	pace->busy_mark_ns = busy_total_of(slot, now);
}
