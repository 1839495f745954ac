// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * Which process was sent a signal that stops, resumes or ends one, how often, and by which process: as the kernel has it,
 * so that none is missed between two looks. One that the kernel sends for a probe is the process's own.
 */
#include <linux/bpf.h>
#include <linux/signal.h>

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

struct task_struct {
	int tgid;
} __attribute__((preserve_access_index));

struct target {
	__u32 tgid;
	__u32 number;
};

struct sent {
	__u64 count;
	__u64 sender; /* of the last one */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__type(key, struct target);
	__type(value, struct sent);
} signals SEC(".maps");

SEC("raw_tp/signal_generate")
int note_signal(struct bpf_raw_tracepoint_args *ctx)
{
	struct task_struct *task = (void *)ctx->args[2];
	struct target key = {.tgid = BPF_CORE_READ(task, tgid), .number = (__u32)ctx->args[0]};
	struct sent first = {.count = 1, .sender = bpf_get_current_pid_tgid() >> 32}, *sent;

	if (key.number != SIGKILL && key.number != SIGTERM && key.number != SIGSTOP && key.number != SIGCONT)
		return 0;
	sent = bpf_map_lookup_elem(&signals, &key);
	if (!sent) {
		bpf_map_update_elem(&signals, &key, &first, BPF_ANY);
		return 0;
	}
	__sync_fetch_and_add(&sent->count, 1);
	sent->sender = first.sender;
	return 0;
}

char LICENSE[] SEC("license") = "GPL";
