// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
#pragma once
#include "gate.bpf.h"
#include "maps.bpf.h"

/* A queue that nothing was added to for so long is taken for empty: elapsed × rate_ppm stays far from 64 bits. */
#define LONGEST_DRAIN_NS 100000000000ull
#define MOST_BLOCKS (1ull << 30)
/* Of max_queued_ns: to what a queue drains before its process is resumed. As in enforce/actuators/launch/resume.py. */
#define LOW_WATER_PERCENT 40
/* A process goes on so long after it is due at most, if its guardian has a CPU: 0.13 to 0.18 ms were measured. */
#define RESUME_NS 200000ull
/*
 * Requests that keep the device for so long without a gap wait for each other, and whatever one of them is made to wait
 * for, all behind it wait for too. Far longer than that the device is busy, not behind.
 */
#define BEHIND_NS 12000000ull
/* Several threads of a process may each run into one stop before it takes hold. As in enforce/actuators/launch/. */
#define SAME_STOP_NS 50000000ull
/* For so long a rule holds for the descendants of a process that is over. If it lives, its rule was removed for all. */
#define INHERITED_NS 60000000000ull
/* Of launches that are free after a stop that another process ended: the kernel does not fight for each of them. */
#define FOREIGN_PASS_NS 1000000000ull
#define BUSY_NS 400000000ull

/* Offline processes give way to the requests of such a process. */
static __always_inline int takes_gate(const struct rule *rule)
{
	return rule && (rule->role == ROLE_ONLINE || rule->role == ROLE_PERIODIC);
}

static __always_inline __u32 slot_of(const struct rule *rule, __u32 device)
{
	return device < ORDINALS ? rule->slots[device & (ORDINALS - 1)] : rule->slot_unknown;
}

static __always_inline void count_online(__u32 slot, __u64 blocks)
{
	struct gate *gate = gate_of(slot);

	if (gate)
		__sync_fetch_and_add(&gate->online_blocks, blocks);
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

	return blank ? find_or_add(&paces, id, &blank->pace, LOST_PACE) : NULL;
}

/* Whether the guardian let this much through. */
static __always_inline int has_pass(const struct process_id *id, struct pace *pace, __u64 estimate)
{
	struct resume *resume = bpf_map_lookup_elem(&resumes, id);

	if (resume && resume->passes != pace->passes) { /* the launch that was stopped went through on it already */
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
	if ((rule->flags & RULE_GATE) && gate &&
	    (rule->flags & RULE_SOFT ? is_busy(gate, now) && is_behind(gate, now) : is_shut(gate, now)))
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

/* Of a launch whose device is not known: one of the rule's devices whose gate is shut, else SLOT_NONE. */
static __noinline __u32 busy_slot(const struct rule *rule, __u64 now)
{
	for (__u32 i = 0; i < ORDINALS; i++) {
		struct gate *gate = gate_of(rule->slots[i]);

		if (gate && is_shut(gate, now))
			return rule->slots[i];
	}
	return SLOT_NONE;
}

/* A launch that is to be stopped. */
struct verdict_on_launch {
	__u32 slot;
	__u32 reason;
	__u64 queued_ns;
	__u64 estimate_ns;
	__u64 due_ns;
	__u32 link; /* of a copy */
	__u32 _pad;
};

enum recorded { RECORDED_NOWHERE, RECORDED_BEFORE, RECORDED_NEW };

/* Another process ended the stop, or swallowed it. */
static __always_inline void count_foreign(struct pace *pace, struct pause *stop, __u64 now)
{
	__sync_fetch_and_add(&pace->foreign, 1);
	pace->pass_left_ns = FOREIGN_PASS_NS;
	stop->foreign_ns = now;
	if (!stop->ran_ns)
		stop->ran_ns = now;
}

/* This thread launches: whether it was stopped the last time, and the guardian has not resumed it since. */
static __always_inline void notice_foreign(const struct process_id *id, struct thread *thread, struct pace *pace,
					   __u64 now)
{
	__u64 stopped_ns = thread ? thread->stopped_ns : 0;
	struct pause *stop;

	if (!stopped_ns)
		return;
	thread->stopped_ns = 0;
	stop = bpf_map_lookup_elem(&stops, id);
	if (stop && stop->at_ns == stopped_ns && may_stop(now)) /* without a lease the backstop resumes it */
		count_foreign(pace, stop, now);
}

/* Writes down that the process is stopped, for the guardian. */
static __always_inline enum recorded record_stop(const struct process_id *id, struct pace *pace,
						 const struct rule *rule, const struct verdict_on_launch *verdict,
						 struct thread *thread)
{
	__u64 now = bpf_ktime_get_ns();
	struct pause *stop = bpf_map_lookup_elem(&stops, id);
	enum recorded recorded = RECORDED_BEFORE;
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);

	if (!stop && blank) {
		if (!bpf_map_update_elem(&stops, id, &blank->pause, BPF_NOEXIST)) /* or another thread was first */
			recorded = RECORDED_NEW;
		stop = bpf_map_lookup_elem(&stops, id);
	}
	if (!stop) {
		count_lost(LOST_PACE);
		return RECORDED_NOWHERE;
	}
	if (recorded == RECORDED_NEW)
		stop->at_ns = now;
	else if (now - (stop->foreign_ns ?: stop->at_ns) > SAME_STOP_NS) /* whichever thread: it should not run */
		count_foreign(pace, stop, now);
	if (thread)
		thread->stopped_ns = stop->at_ns;
	stop->reason = verdict->reason;
	stop->process = *id;
	stop->slot = verdict->slot;
	stop->link = verdict->link;
	stop->queued_ns = verdict->queued_ns;
	stop->estimate_ns = verdict->estimate_ns;
	stop->charged_ns = pace->charged_ns;
	stop->due_ns = verdict->due_ns;
	stop->rule = *rule;
	if (!bpf_map_lookup_elem(&rules, id))
		stop->rule.flags |= RULE_INHERITED;
	stop->kind = PAUSE_STOPPED;
	return recorded;
}

/* Stops the process unless no record of it can be written: whether it did. */
static __always_inline int stop_launch(const struct process_id *id, struct thread *thread, struct pace *pace,
				       const struct rule *rule, const struct verdict_on_launch *verdict)
{
	enum recorded recorded = record_stop(id, pace, rule, verdict, thread);
	int stopped;

	if (recorded == RECORDED_NOWHERE)
		return 0;
	stopped = stop_current_process();
	if (recorded == RECORDED_BEFORE) /* it may have been resumed, and so deleted, before the signal was sent */
		recorded = record_stop(id, pace, rule, verdict, thread);
	if (recorded == RECORDED_NEW)
		post_wake(&(struct wake){.kind = PAUSE_STOPPED, .slot = verdict->slot, .process = *id});
	if (!stopped)
		return 0;
	pace->pauses++;
	if (verdict->reason == PAUSE_GATE)
		pace->gate_pauses++;
	if (verdict->reason == PAUSE_COPY)
		pace->copy_pauses++;
	return 1;
}

/* The rule of a process that has none of its own, and who pays by it: set in `payer`. NULL: there is none. */
static __always_inline struct rule *inherited_rule(const struct process_id *id, struct process_id *payer, __u64 now)
{
	struct payer *found = bpf_map_lookup_elem(&payers, id);
	struct rule *rule;

	if (!found)
		return NULL;
	*payer = found->process;
	rule = bpf_map_lookup_elem(&rules, payer);
	if (rule || bpf_map_lookup_elem(&processes, payer))
		return rule;
	return less(now, found->seen_ns) < INHERITED_NS ? &found->rule : NULL;
}

/* The process's own rule, which the thread keeps until it has changed. For so long at most, whatever is not said. */
#define RULE_KEPT_NS 1000000000ull

static __always_inline struct rule *own_rule(const struct process_id *id, struct thread *thread, __u64 now)
{
	struct control *control = get_control();
	__u64 number = control ? control->rules : 0;
	struct rule *rule;

	if (!thread || !number)
		return bpf_map_lookup_elem(&rules, id);
	if (thread->rules != number || now - thread->rule_ns > RULE_KEPT_NS) {
		rule = bpf_map_lookup_elem(&rules, id);
		thread->has_rule = rule != NULL;
		if (rule)
			thread->rule = *rule;
		thread->rule_ns = now;
		thread->rules = number;
	}
	return thread->has_rule ? &thread->rule : NULL;
}

/* The rule of the process that runs, and who pays by it. */
static __always_inline struct rule *rule_of(const struct process_id *id, const struct process *process,
					    struct thread *thread, struct process_id *payer, __u64 now)
{
	struct rule *rule = own_rule(id, thread, now);

	/* Of a process that has no place among its tenant's it is not known whether it has a payer. */
	if (!rule && (!process || process->inherits))
		rule = inherited_rule(id, payer, now);
	return rule;
}

/* A process was forked: until it has a rule of its own, its launches are charged to who pays for its parent. */
static __always_inline void inherit_rule(const struct process_id *parent, const struct process_id *child)
{
	__u64 now = bpf_ktime_get_ns();
	struct payer payer = {.process = *parent, .seen_ns = now};
	struct rule *rule = bpf_map_lookup_elem(&rules, parent);
	struct payer *older = rule ? NULL : bpf_map_lookup_elem(&payers, parent);

	if (older) {
		payer.process = older->process;
		rule = bpf_map_lookup_elem(&rules, &payer.process);
		if (!rule) {
			payer.seen_ns = older->seen_ns;
			rule = &older->rule;
		}
	}
	if (!rule || rule->role != ROLE_OFFLINE)
		return;
	payer.rule = *rule;
	if (bpf_map_update_elem(&payers, child, &payer, BPF_ANY))
		count_lost(LOST_PACE);
}

/* Charges one launch to an offline process and stops the process if that is too much, or the device is taken. */
static __always_inline void pace_launch(const struct process_id *payer, struct process *process, struct thread *thread,
					const struct rule *rule, __u32 slot, __u64 blocks, __u64 now)
{
	struct process_id self = process_of(thread), *id = &self;
	struct pace *pace = own_pace(payer);
	struct gate *gate = gate_of(slot);
	__u64 estimate = estimate_of(rule, blocks), busy = gate ? busy_total(gate, now) : 0, queued;
	struct verdict_on_launch verdict = {.slot = slot, .estimate_ns = estimate};
	struct queue *queue;

	if (!pace)
		return;
	notice_foreign(id, thread, pace, now);
	queue = queue_of(pace, slot);
	queued = drained_queue(queue, rule, busy, now);
	queue->backlog_ns = drained_backlog(queue, rule, busy, now) + estimate;
	queue->queued_ns = queued + estimate;
	queue->updated_ns = now;
	queue->busy_mark_ns = busy;
	queue->held_ns = 0;
	queue->held_for_ns = 0;
	pace->charged_ns += estimate;
	if (process)
		process->charged_ns += estimate;
	verdict.queued_ns = queued;
	verdict.reason = reason_to_stop(rule, gate, queued, estimate, now);
	if (!verdict.reason || !may_stop(now) || has_pass(payer, pace, estimate))
		return;
	if (!stop_launch(id, thread, pace, rule, &verdict))
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
