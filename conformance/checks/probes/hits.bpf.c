// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/* How often each probe was hit, by the number that it was attached with. */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u64);
} hits SEC(".maps");

SEC("uprobe")
int count(void *registers)
{
	__u32 number = (__u32)bpf_get_attach_cookie(registers);
	__u64 *hit = bpf_map_lookup_elem(&hits, &number);

	if (hit)
		__sync_fetch_and_add(hit, 1); /* another task may come in between on this very CPU */
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
