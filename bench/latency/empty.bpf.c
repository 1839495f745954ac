// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/* What a probe costs that does nothing: the yardstick for those that do something. */
#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

SEC("uprobe")
int empty(void *registers)
{
	(void)registers;
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
