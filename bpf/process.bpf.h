/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Processes: reported to the agent when first seen, with their cgroups, for they may end before it can read /proc.
 */
#pragma once
#include "tenant.bpf.h"

static __always_inline void read_cgroup(struct cgroup_path *path, struct cgroup *cgroup)
{
	struct kernfs_node *node = BPF_CORE_READ(cgroup, kn);

	for (int level = 0; level < CGROUP_LEVELS; level++) {
		path->parts[level][0] = 0;
		if (!node)
			continue;
		bpf_probe_read_kernel_str(path->parts[level], CGROUP_NAME, BPF_CORE_READ(node, name));
		node = parent_of(node);
	}
}

/* Variables and pieces of variables that are looked at: an environment of a megabyte holds as many. */
#define MOST_VARIABLES 4096
#define LONGEST_PIECE 256

/* A walk through an environment: the variables that are looked for count as getenv() has them, the first of a name. */
struct variables {
	__u64 at, end;
	__u64 visible; /* address of the value; 0: not found */
	__u32 found; /* enum environment */
	__u32 inside; /* of a variable: what is at `at` is no beginning */
	__u32 ordered; /* CUDA_DEVICE_ORDER was met */
	char *piece; /* LONGEST_PIECE bytes of its own: another process may run on this CPU meanwhile */
};

#define VISIBLE "CUDA_VISIBLE_DEVICES="
#define ORDER "CUDA_DEVICE_ORDER="

/* Volatile, or clang makes a call of memcmp() of it, which there is not. */
static __always_inline int begins_with(const volatile char *text, const char *word, __u32 length)
{
	for (__u32 i = 0; i < length; i++)
		if (text[i] != word[i])
			return 0;
	return 1;
}
#define begins(text, word) begins_with(text, word, sizeof(word) - 1)

static long next_variable(__u32 index, struct variables *variables)
{
	char *piece = variables->piece;
	long length;

	if (variables->at >= variables->end) {
		variables->found |= ENVIRONMENT_READ;
		return 1;
	}
	length = bpf_probe_read_user_str(piece, LONGEST_PIECE, (void *)variables->at);
	if (length <= 0)
		return 1;
	if (!variables->inside && !variables->visible && begins(piece, VISIBLE))
		variables->visible = variables->at + sizeof(VISIBLE) - 1;
	if (!variables->inside && !variables->ordered && begins(piece, ORDER)) {
		variables->ordered = 1;
		if (begins(piece + sizeof(ORDER) - 1, "PCI_BUS_ID\0"))
			variables->found |= ENVIRONMENT_BUS_ORDER;
	}
	variables->inside = length == LONGEST_PIECE;
	variables->at += variables->inside ? length - 1 : length; /* the last byte of a cut piece is a NUL of our own */
	return 0;
}

/*
 * What its devices are called: the process may end before the agent can read /proc. No inline function: it is in many
 * programs. Since Linux 5.17.
 */
static __noinline int read_environment(struct seen *seen, struct task_struct *task)
{
	struct variables variables = {.piece = seen->visible};

	if (!bpf_core_enum_value_exists(enum bpf_func_id, BPF_FUNC_loop))
		return 0;
	variables.at = BPF_CORE_READ(task, mm, env_start);
	variables.end = BPF_CORE_READ(task, mm, env_end);
	bpf_loop(MOST_VARIABLES, next_variable, &variables, 0);
	if (variables.visible) {
		long length = bpf_probe_read_user_str(seen->visible, sizeof(seen->visible), (void *)variables.visible);

		if (length <= 0 || length == sizeof(seen->visible)) /* it may be longer: then it is not known */
			return 0;
		variables.found |= ENVIRONMENT_VISIBLE;
	}
	seen->environment = variables.found;
	return 0;
}

static __always_inline void post_seen(__u32 library, const struct process_id *process)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct css_set *set = BPF_CORE_READ(task, cgroups);
	struct seen *seen = bpf_ringbuf_reserve(&events, sizeof(struct seen), 0);

	if (!seen) {
		count_lost(LOST_EVENT);
		return;
	}
	seen->event.kind = EVENT_PROCESS_SEEN;
	seen->event.library = library;
	seen->event.process = *process;
	seen->event.at_ns = bpf_ktime_get_ns();
	seen->uid = bpf_get_current_uid_gid();
	seen->environment = 0;
	seen->visible[0] = 0;
	read_environment(seen, task);
	bpf_get_current_comm(seen->command, sizeof(seen->command));
	read_cgroup(&seen->unified, BPF_CORE_READ(set, dfl_cgrp));
	read_cgroup(&seen->legacy, memory_cgroup(set));
	bpf_ringbuf_submit(seen, 0);
}

/* Counted as lost, unless another thread was first. Whether it is lost. */
static __always_inline int lose_process(const struct process_id *id)
{
	if (bpf_map_lookup_elem(&processes, id))
		return 0;
	count_lost(LOST_PROCESS);
	return 1;
}

/* A process that is not known yet, the one that runs. No inline function: its states would be those of what follows. */
__noinline int add_process(__u64 cookie)
{
	struct process_id id = this_process();
	struct process *process;
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);

	if (!blank || !take_credit(LOST_PROCESS)) {
		lose_process(&id);
		return 0;
	}
	note_tenant(&id); /* before other threads see it: what they add needs an owner */
	if (bpf_map_update_elem(&processes, &id, &blank->process, BPF_NOEXIST)) {
		if (lose_process(&id))
			bpf_map_delete_elem(&tenant_of, &id);
		return 0;
	}
	process = bpf_map_lookup_elem(&processes, &id);
	if (!process)
		return 0;
	process->first_seen_ns = bpf_ktime_get_ns();
	process->slot = SLOT_NONE;
	process->inherits = !!bpf_map_lookup_elem(&payers, &id);
	if (take_credit(LOST_EVENT)) /* else the agent finds it at its next tick, by what it counted */
		post_seen(COOKIE_LIBRARY(cookie), &id);
	return 0;
}

/* NULL: there is no room for it. */
static __always_inline struct process *find_process(const struct process_id *id, __u64 cookie)
{
	struct process *process = bpf_map_lookup_elem(&processes, id);

	if (process)
		return process;
	add_process(cookie);
	return bpf_map_lookup_elem(&processes, id);
}

/* A call of a process, which is known from then on. False: it is the second probe of one call. */
static __always_inline int begin_call(struct pt_regs *ctx, __u64 cookie, const struct process_id *id)
{
	find_process(id, cookie);
	return !is_duplicate(ctx, cookie);
}
