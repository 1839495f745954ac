/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* A program of a uprobe that may lose its CPU to another thread amid its work. */
#pragma once

/*
 * From Linux 6.13 on, a program of this type that uses 64 bytes of stack or more has one stack for each CPU ("private
 * stack"), because the kernel lets none begin while the same one runs on that CPU. It asks that of kprobes and not of
 * uprobes: where it is preemptible (lazily, too), a thread that takes the CPU from another one amid a probe and meets
 * the same probe writes over its stack, and the kernel ends in an oops: in wait_enter, on Debian's 6.18.12 and 7.3. A
 * program that can call another one's tail has its stack on its thread's, as all had before. None is ever called: the
 * array is empty, and no probed instruction lies at 0. (To keep the CPU would do as well, but until 6.14 the kernel lets
 * no global function be called then.)
 */
#define STACK_OF_THREAD(name)                                                                                          \
	struct {                                                                                                       \
		__uint(type, BPF_MAP_TYPE_PROG_ARRAY);                                                                 \
		__uint(max_entries, 1);                                                                                \
		__type(key, __u32);                                                                                    \
		__type(value, __u32);                                                                                  \
	} name SEC(".maps")

STACK_OF_THREAD(no_program);

/* `PROBE("uprobe", name) { … }` defines the program `name` with the argument `ctx`. */
#define PROBE(section, name) PROBE_BESIDE(section, name, no_program)

/* Programs that are attached in different ways, or that change registers, share no array: the kernel refuses that. */
#define PROBE_BESIDE(section, name, empty)                                                                             \
	static __always_inline int name##_body(struct pt_regs *ctx);                                                   \
	SEC(section)                                                                                                   \
	int name(struct pt_regs *ctx)                                                                                  \
	{                                                                                                              \
		if (!PT_REGS_IP(ctx))                                                                                  \
			bpf_tail_call(ctx, &empty, 0);                                                                 \
		return name##_body(ctx);                                                                               \
	}                                                                                                              \
	static __always_inline int name##_body(struct pt_regs *ctx)

/* With an array of its own. */
#define PROBE_ALONE(section, name)                                                                                     \
	STACK_OF_THREAD(name##_calls_none);                                                                            \
	PROBE_BESIDE(section, name, name##_calls_none)
