/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Processes: told to the agent when first seen, with their cgroups, for they may be over before anybody can read /proc.
 */
#pragma once
#include "maps.bpf.h"

struct kernfs_node {
	struct kernfs_node *parent;
	const char *name;
} CO_RE;

struct kernfs_node___renamed { /* since Linux 6.15 */
	struct kernfs_node___renamed *__parent;
} CO_RE;

struct cgroup {
	struct kernfs_node *kn;
} CO_RE;

struct cgroup_subsys_state {
	struct cgroup *cgroup;
} CO_RE;

struct css_set {
	struct cgroup *dfl_cgrp;
	struct cgroup_subsys_state *subsys[1];
} CO_RE;

enum cgroup_subsys_id { memory_cgrp_id = 1 }; /* CO-RE finds the running kernel's value */

static __always_inline struct kernfs_node *parent_of(struct kernfs_node *node)
{
	if (bpf_core_field_exists(node->parent))
		return BPF_CORE_READ(node, parent);
	return (struct kernfs_node *)BPF_CORE_READ((struct kernfs_node___renamed *)node, __parent);
}

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

/* Where the memory controller has the task; on a host with cgroup v2 alone that is the same as the v2 path. */
static __always_inline struct cgroup *memory_cgroup(struct css_set *set)
{
	struct cgroup_subsys_state *state = NULL;
	__u64 offset = __builtin_preserve_field_info(set->subsys, BPF_FIELD_BYTE_OFFSET);

	if (!bpf_core_enum_value_exists(enum cgroup_subsys_id, memory_cgrp_id))
		return NULL;
	offset += sizeof(void *) * bpf_core_enum_value(enum cgroup_subsys_id, memory_cgrp_id);
	if (bpf_probe_read_kernel(&state, sizeof(state), (void *)set + offset) || !state)
		return NULL;
	return BPF_CORE_READ(state, cgroup);
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
	seen->_pad = 0;
	bpf_get_current_comm(seen->command, sizeof(seen->command));
	read_cgroup(&seen->unified, BPF_CORE_READ(set, dfl_cgrp));
	read_cgroup(&seen->legacy, memory_cgroup(set));
	bpf_ringbuf_submit(seen, 0);
}

static __always_inline struct process *find_process(const struct process_id *id, __u64 cookie)
{
	struct process *process = bpf_map_lookup_elem(&processes, id);
	__u32 zero = 0;
	struct blank *blank;

	if (process)
		return process;
	blank = bpf_map_lookup_elem(&blanks, &zero);
	if (!blank || bpf_map_update_elem(&processes, id, &blank->process, BPF_NOEXIST)) {
		process = bpf_map_lookup_elem(&processes, id); /* another CPU was first, or the map is full */
		if (!process)
			count_lost(LOST_PROCESS);
		return process;
	}
	process = bpf_map_lookup_elem(&processes, id);
	if (process) {
		process->first_seen_ns = bpf_ktime_get_ns();
		process->slot = SLOT_NONE;
		post_seen(COOKIE_LIBRARY(cookie), id);
	}
	return process;
}
