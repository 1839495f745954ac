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
	if (!blank || !take_credit(LOST_PROCESS) || bpf_map_update_elem(&processes, id, &blank->process, BPF_NOEXIST)) {
		process = bpf_map_lookup_elem(&processes, id); /* another CPU was first, or there is no room */
		if (!process)
			count_lost(LOST_PROCESS);
		return process;
	}
	process = bpf_map_lookup_elem(&processes, id);
	if (process) {
		process->first_seen_ns = bpf_ktime_get_ns();
		process->slot = SLOT_NONE;
		process->inherits = !!bpf_map_lookup_elem(&payers, id);
		note_tenant(id);
		if (take_credit(LOST_EVENT)) /* else the agent finds it at its next tick, by what it counted */
			post_seen(COOKIE_LIBRARY(cookie), id);
	}
	return process;
}
