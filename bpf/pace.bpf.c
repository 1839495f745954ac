// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "maps.bpf.h"

/* A request that neither launches nor waits for so long counts as over: its wait may be one that we do not see. */
#define DEFAULT_HOLD_NS 20000000ull
/* And one that only waits, after so long: no count of ours may shut a gate for good. */
#define LONGEST_WAIT_HOLDS 100
/* A queue that nothing was added to for so long is taken for empty: elapsed × rate_ppm stays far from 64 bits. */
#define LONGEST_DRAIN_NS 100000000000ull
#define MOST_BLOCKS (1ull << 30)
/* Of max_queued_ns: to what a queue drains before its process is resumed. As in enforce/actuators/launch/resume.py. */
#define LOW_WATER_PERCENT 40
/* A process goes on so long after it is due at most, if its guardian has a CPU: 0.13 to 0.18 ms were measured. */
#define RESUME_NS 200000ull
/* A shorter gap between two requests is their service's own work: the second had been waiting for the first. */
#define STRETCH_GAP_NS 500000ll
/*
 * Requests that keep the device for so long without a gap wait for each other, and whatever one of them is made to wait
 * for, all behind it wait for too. Far longer than that the device is busy, not behind.
 */
#define BEHIND_NS 12000000ull
#define BUSY_NS 400000000ull

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

static __always_inline void count_online(__u32 slot, __u64 blocks)
{
	struct gate *gate = gate_of(slot);

	if (gate)
		__sync_fetch_and_add(&gate->online_blocks, blocks);
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
	if (__sync_fetch_and_add(&gate->open, 1) > 0)
		return;
	gate->busy_since_ns = now;
	if ((__s64)(now - gate->last_free_ns) > STRETCH_GAP_NS) /* it may just have been freed, after `now` */
		gate->stretch_since_ns = now;
}

/* More is heard of the open requests. If they counted as over they go on from here: the time between was nobody's. */
static __always_inline void revive_requests(struct gate *gate, __u64 now)
{
	__u64 since = gate->busy_since_ns, ran = busy_for(gate, now);

	if (gate->open <= 0 || is_busy(gate, now))
		return;
	if (__sync_val_compare_and_swap(&gate->busy_since_ns, since, now) == since) {
		__sync_fetch_and_add(&gate->busy_total_ns, ran);
		gate->stretch_since_ns = now;
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

static __always_inline __u64 less(__u64 from, __u64 what)
{
	return from > what ? from - what : 0;
}

/* How long a virtual queue has drained since it was updated. */
static __always_inline __u64 elapsed_of(const struct queue *queue, const struct rule *rule, __u64 busy, __u64 now)
{
	__u64 elapsed = less(now, queue->updated_ns);

	return rule->flags & RULE_GATE ? less(elapsed, less(busy, queue->busy_mark_ns)) : elapsed;
}

/* What is left of a virtual queue now. */
static __always_inline __u64 drained_queue(const struct queue *queue, const struct rule *rule, __u64 busy, __u64 now)
{
	__u64 elapsed = elapsed_of(queue, rule, busy, now);

	if (elapsed > LONGEST_DRAIN_NS)
		return 0;
	return less(queue->queued_ns, elapsed * rule->rate_ppm / PPM);
}

/* What is believed to be on the GPU now. A launch that was stopped gets there when its process is resumed. */
static __always_inline __u64 drained_backlog(const struct queue *queue, const struct rule *rule, __u64 busy, __u64 now)
{
	__u64 elapsed = elapsed_of(queue, rule, busy, now);
	__u64 held = elapsed < queue->held_for_ns ? elapsed : queue->held_for_ns;

	return less(less(queue->backlog_ns, held) + queue->held_ns, elapsed - held);
}

/* What a drained wait leaves of a virtual queue: what the share has not paid back, and a longest pause can. */
static __always_inline __u64 kept_queue(const struct queue *queue, const struct rule *rule, __u64 busy, __u64 now)
{
	__u64 queued, most;

	if (!rule || (rule->rate_ppm >= PPM && !(rule->flags & RULE_BLOCKS)))
		return 0;
	queued = drained_queue(queue, rule, busy, now);
	most = rule->max_queued_ns;
	if (!(rule->flags & RULE_BLOCKS)) { /* blocks are counted, not estimated: there a wait proves nothing */
		queued = less(queued, drained_backlog(queue, rule, busy, now));
		most += rule->max_pause_ns * rule->rate_ppm / PPM;
	}
	return queued < most ? queued : most;
}

/* How long until a launch that was stopped fits. As in enforce/actuators/launch/resume.py. */
static __always_inline __u64 drain_ns(const struct rule *rule, __u64 queued, __u64 estimate)
{
	__u64 room = less(rule->max_queued_ns, estimate);
	__u64 low = rule->max_queued_ns / 100 * LOW_WATER_PERCENT;

	return less(queued, room < low ? room : low) * PPM / (rule->rate_ppm ? rule->rate_ppm : 1);
}

static __always_inline struct queue *queue_of(struct pace *pace, __u32 slot)
{
	if (slot >= SLOTS)
		return &pace->queues[SLOTS];
	barrier_var(slot); /* or clang leaves the mask out, and the verifier of Linux 6.1 sees no bound */
	return &pace->queues[slot & (SLOTS - 1)];
}

static __always_inline struct pace *own_pace(const struct process_id *id)
{
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);

	return blank ? find_or_add(&paces, id, &blank->pace, LOST_PROCESS) : NULL;
}

/* Whether the guardian let this much through. */
static __always_inline int has_pass(const struct process_id *id, struct pace *pace, __u64 estimate)
{
	struct resume *resume = bpf_map_lookup_elem(&resumes, id);

	if (!resume)
		return 0;
	if (resume->passes != pace->passes) { /* the launch that was stopped went through on it already */
		pace->passes = resume->passes;
		pace->pass_left_ns = resume->pass_ns;
	}
	if (pace->pass_left_ns < estimate)
		return 0;
	pace->pass_left_ns -= estimate;
	return 1;
}

static __always_inline int may_stop(__u64 now)
{
	struct control *control = get_control();

	return control && control->lease_until_ns >= now;
}

static __always_inline __u64 estimate_of(const struct rule *rule, __u64 blocks)
{
	return rule->flags & RULE_BLOCKS ? rule->launch_ns * (blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS)
					 : rule->launch_ns;
}

static __always_inline int is_behind(const struct gate *gate, __u64 now)
{
	__u64 lasted = now - gate->stretch_since_ns;

	return lasted > BEHIND_NS && lasted < BUSY_NS;
}

static __always_inline __u32 reason_to_stop(const struct rule *rule, const struct gate *gate, __u64 queued,
					    __u64 estimate, __u64 now)
{
	if ((rule->flags & RULE_GATE) && gate && is_busy(gate, now) &&
	    (!(rule->flags & RULE_SOFT) || is_behind(gate, now)))
		return PAUSE_GATE;
	if ((rule->flags & RULE_PACE) && queued > 0 && queued + estimate > rule->max_queued_ns)
		return PAUSE_QUEUE;
	return 0;
}

/* For each thread its own: a process has one SIGSTOP pending at a time, and the thread that is to take it may lack a CPU. */
static __always_inline int stop_current_process(void)
{
	return bpf_send_signal_thread(SIGSTOP) == 0;
}

/* Stops the process unless nobody would hear of it: whether it did. */
static __always_inline int stop_launch(const struct process_id *id, struct pace *pace, const struct rule *rule,
				       __u32 slot, __u32 reason, __u64 queued, __u64 estimate)
{
	struct pause *pause = bpf_ringbuf_reserve(&pauses, sizeof(struct pause), 0);

	if (!pause) {
		count_lost(LOST_EVENT);
		return 0;
	}
	if (!stop_current_process()) {
		bpf_ringbuf_discard(pause, 0);
		return 0;
	}
	pace->pauses++;
	if (reason == PAUSE_GATE)
		pace->gate_pauses++;
	pause->kind = PAUSE_STOPPED;
	pause->reason = reason;
	pause->process = *id;
	pause->slot = slot;
	pause->_pad = 0;
	pause->at_ns = bpf_ktime_get_ns();
	pause->queued_ns = queued;
	pause->estimate_ns = estimate;
	pause->charged_ns = pace->charged_ns;
	pause->rule = *rule;
	bpf_ringbuf_submit(pause, 0);
	return 1;
}

/* Charges one launch to an offline process and stops the process if that is too much, or the device is taken. */
static __always_inline void pace_launch(const struct process_id *id, struct process *process, const struct rule *rule,
					__u32 slot, __u64 blocks, __u64 now)
{
	struct pace *pace = own_pace(id);
	struct gate *gate = gate_of(slot);
	__u64 estimate = estimate_of(rule, blocks), busy = gate ? busy_total(gate, now) : 0, queued;
	struct queue *queue;
	__u32 reason;

	if (!pace)
		return;
	queue = queue_of(pace, slot);
	queued = drained_queue(queue, rule, busy, now);
	queue->backlog_ns = drained_backlog(queue, rule, busy, now) + estimate;
	queue->queued_ns = queued + estimate;
	queue->updated_ns = now;
	queue->busy_mark_ns = busy;
	queue->held_ns = 0;
	queue->held_for_ns = 0;
	pace->charged_ns += estimate;
	process->charged_ns += estimate;
	reason = reason_to_stop(rule, gate, queued, estimate, now);
	if (!reason || !may_stop(now) || has_pass(id, pace, estimate))
		return;
	if (!stop_launch(id, pace, rule, slot, reason, queued, estimate))
		return;
	queue->backlog_ns = less(queue->backlog_ns, estimate);
	queue->held_ns = estimate;
	queue->held_for_ns = drain_ns(rule, queued, estimate) + RESUME_NS;
}

/*
 * The process has waited everything out: whatever the estimates said, nothing of it is on the GPU. Not so behind a soft
 * gate while a request runs: then what the request was made to wait for counts, until there is a gap to make up for it.
 */
static __always_inline void settle_queue(const struct process_id *id, const struct rule *rule, __u32 slot, __u64 now)
{
	struct pace *pace = bpf_map_lookup_elem(&paces, id);
	struct gate *gate = gate_of(slot);
	struct queue *queue;
	__u64 busy;

	if (!pace || (rule && (rule->flags & RULE_SOFT) && gate && is_busy(gate, now)))
		return;
	queue = queue_of(pace, slot);
	busy = gate ? busy_total(gate, now) : 0;
	queue->queued_ns = kept_queue(queue, rule, busy, now);
	queue->updated_ns = now;
	queue->busy_mark_ns = busy;
	queue->backlog_ns = 0;
	queue->held_ns = 0;
	queue->held_for_ns = 0;
}
