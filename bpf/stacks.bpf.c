// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/* An object of its own: loaded only while `gpuwarden stacks` runs, beside the agent's or without it. */
#include <linux/bpf.h>
#include <linux/ptrace.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "abi.h"
#include "launch.h"
#include "memory.h"
#include "probe.bpf.h"
#include "stacks.h"

char _license[] SEC("license") = "Dual BSD/GPL";

#define HASH(name, map_type, key_type, value_type, entries)                                                            \
	struct {                                                                                                       \
		__uint(type, map_type);                                                                                \
		__uint(max_entries, entries);                                                                          \
		__type(key, key_type);                                                                                 \
		__type(value, value_type);                                                                             \
	} name SEC(".maps")

/* An allocation or a free between its entry and its return. */
struct pending {
	struct stack_key stack;
	__u64 pointer; /* where the result will be; of a free the pointer itself */
	__u64 bytes;
	__u64 pitch; /* where the pitch will be, if it has one */
};

struct owner_key {
	__u64 address;
	__u32 tgid;
	__u32 _pad;
};

HASH(wanted, BPF_MAP_TYPE_HASH, __u32, __u32, 4096);
HASH(counts, BPF_MAP_TYPE_HASH, struct stack_key, __u64, 16384);
HASH(live, BPF_MAP_TYPE_HASH, struct live_key, struct live, 65536);
HASH(allocating, BPF_MAP_TYPE_LRU_HASH, __u64, struct pending, 8192);
HASH(freeing, BPF_MAP_TYPE_LRU_HASH, __u64, struct pending, 8192);
HASH(owners, BPF_MAP_TYPE_LRU_HASH, struct owner_key, __u32, 8192);
HASH(every, BPF_MAP_TYPE_ARRAY, __u32, __u32, 1);
HASH(tallies, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, TALLIES);

struct {
	__uint(type, BPF_MAP_TYPE_STACK_TRACE);
	__uint(max_entries, 8192);
	__uint(key_size, sizeof(__u32));
	__uint(value_size, STACK_FRAMES * sizeof(__u64));
} stacks SEC(".maps");

static __always_inline void tally(__u32 index)
{
	__u64 *count = bpf_map_lookup_elem(&tallies, &index);

	if (count)
		(*count)++;
}

static __always_inline __u32 this_tgid(void)
{
	return bpf_get_current_pid_tgid() >> 32;
}

/* False for other processes, and where the same file is probed a second time through another overlay mount. */
static __always_inline int is_wanted(struct pt_regs *ctx)
{
	struct owner_key key = {.address = PT_REGS_IP(ctx), .tgid = this_tgid()};
	__u32 library = COOKIE_LIBRARY(bpf_get_attach_cookie(ctx));
	__u32 *owner;

	if (!bpf_map_lookup_elem(&wanted, &key.tgid))
		return 0;
	owner = bpf_map_lookup_elem(&owners, &key);
	if (owner)
		return *owner == library;
	bpf_map_update_elem(&owners, &key, &library, BPF_NOEXIST);
	return 1;
}

static __always_inline __u64 return_address(struct pt_regs *ctx)
{
#if defined(__TARGET_ARCH_x86)
	__u64 address = 0;

	bpf_probe_read_user(&address, sizeof(address), (void *)PT_REGS_SP(ctx)); /* 0 adds no frame */
	return address;
#else
	return PT_REGS_RET(ctx);
#endif
}

static __always_inline int take_stack(struct pt_regs *ctx, struct stack_key *key)
{
	long stack = bpf_get_stackid(ctx, &stacks, BPF_F_USER_STACK);

	if (stack < 0) {
		tally(stack == -17 ? TALLY_COLLISION : TALLY_NO_STACK); /* EEXIST */
		return 0;
	}
	key->tgid = this_tgid();
	key->stack = stack;
	key->caller = return_address(ctx);
	return 1;
}

/* Drawn at random: every Nth would follow the rhythm of a training step, and see the same call of it each time. */
static __always_inline __u32 drawn_weight(void)
{
	__u32 zero = 0, *n = bpf_map_lookup_elem(&every, &zero);

	if (!n || *n <= 1)
		return 1;
	return bpf_get_prandom_u32() % *n ? 0 : *n;
}

PROBE_ALONE("uprobe", stacks_launch)
{
	struct stack_key key = {};
	__u64 *count, none = 0, weight;

	if (!is_wanted(ctx))
		return 0;
	tally(TALLY_SEEN);
	weight = drawn_weight();
	if (!weight || !take_stack(ctx, &key))
		return 0;
	bpf_map_update_elem(&counts, &key, &none, BPF_NOEXIST); /* -EEXIST is the usual case */
	count = bpf_map_lookup_elem(&counts, &key);
	if (!count) {
		tally(TALLY_FULL);
		return 0;
	}
	__sync_fetch_and_add(count, weight);
	tally(TALLY_SAMPLED);
	return 0;
}

/* Memory that cuMemCreate makes elsewhere than on a device is not the device's. */
static __always_inline int is_elsewhere(__u64 property)
{
	struct location location = {.type = LOCATION_DEVICE};

	if (bpf_probe_read_user(&location, sizeof(location), (void *)property + LOCATION_OFFSET))
		tally(TALLY_UNREADABLE);
	return location.type != LOCATION_DEVICE;
}

PROBE_ALONE("uprobe", stacks_alloc_enter)
{
	__u64 thread = bpf_get_current_pid_tgid(), first = PT_REGS_PARM1(ctx), second = PT_REGS_PARM2(ctx);
	__u64 third = PT_REGS_PARM3(ctx), fourth = PT_REGS_PARM4(ctx);
	__u32 shape = COOKIE_SHAPE(bpf_get_attach_cookie(ctx));
	struct pending pending = {.pointer = first, .bytes = second};

	if (!is_wanted(ctx) || (shape == ALLOC_PHYSICAL && is_elsewhere(third)))
		return 0;
	tally(TALLY_SEEN);
	if (shape == ALLOC_PITCH) {
		pending.pitch = second;
		pending.bytes = fourth;
	}
	if (take_stack(ctx, &pending.stack) && bpf_map_update_elem(&allocating, &thread, &pending, BPF_ANY))
		tally(TALLY_FULL);
	return 0;
}

static __always_inline void keep(struct live_key *key, const struct pending *pending)
{
	struct live value = {.stack = pending->stack, .bytes = pending->bytes};

	if (bpf_map_update_elem(&live, key, &value, BPF_ANY))
		tally(TALLY_FULL);
	else
		tally(TALLY_SAMPLED);
}

PROBE_ALONE("uretprobe", stacks_alloc_return)
{
	__u64 thread = bpf_get_current_pid_tgid(), pitch = 0;
	struct pending *found = bpf_map_lookup_elem(&allocating, &thread), pending;
	struct live_key key = {.tgid = thread >> 32};

	if (!found)
		return 0;
	pending = *found;
	bpf_map_delete_elem(&allocating, &thread);
	if ((__u32)PT_REGS_RC(ctx) != 0)
		return 0;
	if (bpf_probe_read_user(&key.pointer, sizeof(key.pointer), (void *)pending.pointer) ||
	    (pending.pitch && bpf_probe_read_user(&pitch, sizeof(pitch), (void *)pending.pitch))) {
		tally(TALLY_UNREADABLE);
		return 0;
	}
	if (pending.pitch)
		pending.bytes *= pitch;
	keep(&key, &pending);
	return 0;
}

/* Forgotten before the call: once it has freed, another thread may be given the same pointer. */
PROBE_ALONE("uprobe", stacks_free_enter)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct live_key key = {.pointer = PT_REGS_PARM1(ctx), .tgid = thread >> 32};
	struct pending pending = {.pointer = key.pointer};
	struct live *found;

	if (!is_wanted(ctx))
		return 0;
	found = bpf_map_lookup_elem(&live, &key);
	if (!found)
		return 0; /* made before the probes were there */
	pending.stack = found->stack;
	pending.bytes = found->bytes;
	bpf_map_delete_elem(&live, &key);
	if (bpf_map_update_elem(&freeing, &thread, &pending, BPF_ANY))
		tally(TALLY_FULL);
	return 0;
}

PROBE_ALONE("uretprobe", stacks_free_return)
{
	__u64 thread = bpf_get_current_pid_tgid();
	struct pending *found = bpf_map_lookup_elem(&freeing, &thread);
	struct live_key key = {.tgid = thread >> 32};
	struct live value = {};

	if (!found)
		return 0;
	key.pointer = found->pointer;
	value.stack = found->stack;
	value.bytes = found->bytes;
	bpf_map_delete_elem(&freeing, &thread);
	if ((__u32)PT_REGS_RC(ctx) != 0 && bpf_map_update_elem(&live, &key, &value, BPF_NOEXIST))
		tally(TALLY_FULL);
	return 0;
}
