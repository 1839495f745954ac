// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/*
 * Asks the kernel whether a uprobe may change registers, by loading: Linux ≥ 6.18 says yes, older ones refuse. Never
 * attached. The program that denies allocations, memory_enter_or_deny, is in gpuwarden.bpf.o and loaded if this is.
 */
#include <linux/bpf.h>
#include <linux/ptrace.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

#include "registers.bpf.h"

SEC("uprobe")
int deny_probe(struct pt_regs *ctx)
{
	return_early(ctx, 2, PT_REGS_IP(ctx) + 1); /* another value, or the compiler would leave the write out */
	return 0;
}

char LICENSE[] SEC("license") = "Dual BSD/GPL";
