/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Budgets: how many entries of the bounded maps each tenant may still make. The kernel only takes from a credit, on
 * insert; the agent counts what each holds and writes the credit anew every tick, so nothing leaks, and while it is
 * not written the losses are the tenant's own.
 *
 * A tenant is the outermost cgroup that belongs to one: below the first level, and no slice, nor what the kubelet makes
 * without slices. Cgroups that a container makes within its own are its own.
 */
#pragma once
#include "maps.bpf.h"

struct kernfs_node {
	struct kernfs_node *parent;
	const char *name;
	__u64 id;
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

#define TENANT_LEVELS 24 /* what nests deeper shares TENANT_OTHERS */
#define SLICE 0x6563696c732eull /* ".slice" */
#define BURSTABLE 0x6c62617473727562ull /* "burstabl" */
#define BEST_EFFORT 0x6f66666574736562ull /* "besteffo" */
#define DOCKER 0x72656b636f64ull /* "docker" and its NUL: also below a slice or another parent */
#define SEVEN_BYTES 0xffffffffffffffull
#define LXC 0x6c7961702e63786cull /* "lxc.payl": LXC puts containers at the first level */

#define NAME_PART 16
#define NAME_PARTS 8

/* With its NUL; a name is looked through in parts, as the stack is small where this is called. */
static __always_inline long name_length(const char *name)
{
	char part[NAME_PART];
	long total = 0;

	for (int i = 0; i < NAME_PARTS; i++) {
		long length = bpf_probe_read_kernel_str(part, sizeof(part), name + total);

		if (length < 0)
			return 0;
		if (length < NAME_PART)
			return total + length;
		total += NAME_PART - 1;
	}
	return total;
}

/*
 * Whether a cgroup, by the address of its kernfs_node, only holds others, which are several tenants'. No inline function
 * and not static: verified once in a program, and not at each level.
 */
__noinline int is_folder(__u64 node, int is_first_level)
{
	const char *name = BPF_CORE_READ((struct kernfs_node *)node, name);
	__u64 head = 0, tail = 0;
	long length = name_length(name);

	bpf_probe_read_kernel(&head, sizeof(head), name);
	if (is_first_level)
		return length <= 8 || head != LXC;
	if (length > 7)
		bpf_probe_read_kernel(&tail, 7, name + length - 7);
	if ((head & SEVEN_BYTES) == DOCKER)
		return 1;
	return tail == SLICE || (length > 8 && (head == BURSTABLE || head == BEST_EFFORT));
}

static __always_inline __u64 tenant_at(struct kernfs_node *node)
{
	__u64 tenant = TENANT_OTHERS;

	for (int level = 0; node && level < TENANT_LEVELS; level++) {
		struct kernfs_node *parent = parent_of(node);

		if (!parent)
			return tenant;
		if (tenant == TENANT_OTHERS || !is_folder((__u64)node, !parent_of(parent)))
			tenant = BPF_CORE_READ(node, id);
		node = parent;
	}
	return TENANT_OTHERS;
}

/* No inline function: verified once, not in each program. */
__noinline __u64 this_tenant(void)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct css_set *set = BPF_CORE_READ(task, cgroups);
	__u64 tenant = tenant_at(BPF_CORE_READ(set, dfl_cgrp, kn));
	struct cgroup *legacy;

	if (tenant != TENANT_OTHERS)
		return tenant;
	legacy = memory_cgroup(set);
	return legacy ? tenant_at(BPF_CORE_READ(legacy, kn)) : TENANT_OTHERS;
}

static __always_inline struct tenant *find_tenant(__u64 id)
{
	struct tenant *tenant = bpf_map_lookup_elem(&tenants, &id);
	__u32 zero = 0;
	struct tenant *first;

	if (tenant)
		return tenant;
	first = bpf_map_lookup_elem(&newcomer, &zero);
	if (first)
		bpf_map_update_elem(&tenants, &id, first, BPF_NOEXIST);
	tenant = bpf_map_lookup_elem(&tenants, &id);
	if (tenant || id == TENANT_OTHERS)
		return tenant;
	id = TENANT_OTHERS; /* too many tenants: the agent made this entry */
	return bpf_map_lookup_elem(&tenants, &id);
}

static __always_inline void count_tenant_loss(__u64 id, __u32 reason)
{
	struct tenant_loss *loss = bpf_map_lookup_elem(&tenant_losses, &id);
	__u32 zero = 0;
	struct blank *blank = bpf_map_lookup_elem(&blanks, &zero);

	if (!loss && blank) {
		bpf_map_update_elem(&tenant_losses, &id, &blank->tenant_loss, BPF_NOEXIST);
		loss = bpf_map_lookup_elem(&tenant_losses, &id);
	}
	if (loss && reason < LOST_REASONS)
		__sync_fetch_and_add(&loss->lost[reason], 1);
}

/* The tenant of a process that has a place among its tenant's. */
static __always_inline int known_tenant(__u64 *id)
{
	struct process_id process = this_process();
	__u64 *known = bpf_map_lookup_elem(&tenant_of, &process);

	if (known)
		*id = *known;
	return known != NULL;
}

/*
 * Takes one from the tenant's credit for what `reason` counts the loss of; 0: it has none left. A process that has no
 * place among its tenant's processes has none elsewhere: the agent could not tell whose its entries are, and would not
 * count them against anyone. No inline function: it is in many programs, several times in each.
 */
__noinline int take_credit(__u32 reason)
{
	__u32 zero = 0;
	struct tenant *tenant = bpf_map_lookup_elem(&newcomer, &zero);
	__u64 id;

	if (!tenant || reason >= LOST_REASONS || !tenant->credit[reason])
		return 1; /* not bounded, or no agent counts */
	if (!known_tenant(&id)) {
		id = this_tenant();
		if (reason != LOST_PROCESS) {
			count_tenant_loss(id, reason);
			return 0;
		}
	}
	tenant = find_tenant(id);
	if (!tenant)
		return 1;
	if (tenant->credit[reason] > 0) {
		__sync_fetch_and_add(&tenant->credit[reason], -1);
		return 1;
	}
	count_tenant_loss(id, reason);
	return 0;
}

/* What it took is free again: else who makes and frees many between two ticks would run out of credit. */
__noinline int give_credit(__u32 reason)
{
	struct tenant *tenant;
	__u64 id;

	if (reason >= LOST_REASONS || !known_tenant(&id))
		return 0;
	tenant = bpf_map_lookup_elem(&tenants, &id);
	if (tenant)
		__sync_fetch_and_add(&tenant->credit[reason], 1);
	return 0;
}

/* Says whose a process is, until the agent forgets it: what it made outlives it. */
static __always_inline void note_tenant(const struct process_id *id)
{
	__u64 tenant = this_tenant();

	bpf_map_update_elem(&tenant_of, id, &tenant, BPF_ANY);
}
