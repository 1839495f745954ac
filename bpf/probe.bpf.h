/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* A program of a uprobe that keeps its CPU from its first line to its last. */
#pragma once

/* Since Linux 6.10. */
extern void bpf_preempt_disable(void) __weak __ksym;
extern void bpf_preempt_enable(void) __weak __ksym;

/*
 * `PROBE("uprobe", name) { … }` defines the program `name` with the argument `ctx`.
 *
 * From Linux 6.13 on, programs of this type with 64 bytes of stack or more have one stack for each CPU ("private
 * stack"), because the kernel lets none of them begin while it runs on the same CPU. Those of uprobes are not asked:
 * where the kernel is preemptible (also lazily), another thread that meets the probe on the CPU of one that has lost it
 * writes over its stack, and the kernel ends in an oops. It did so in wait_enter on Debian's 6.18.12. Before 6.10 there is
 * no such stack, and only an increment of a counter per CPU can be lost.
 */
#define PROBE(section, name)                                                                                           \
	static __always_inline int name##_undisturbed(struct pt_regs *ctx);                                            \
	SEC(section)                                                                                                   \
	int name(struct pt_regs *ctx)                                                                                  \
	{                                                                                                              \
		if (bpf_preempt_disable)                                                                               \
			bpf_preempt_disable();                                                                         \
		name##_undisturbed(ctx);                                                                               \
		if (bpf_preempt_enable)                                                                                \
			bpf_preempt_enable();                                                                          \
		return 0;                                                                                              \
	}                                                                                                              \
	static __always_inline int name##_undisturbed(struct pt_regs *ctx)
