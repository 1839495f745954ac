/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Where a probed call goes on. */
#pragma once

/*
 * Lets the call end with `result` before its first instruction: it goes on at `ret`, the address of some return
 * instruction, which the program then executes itself. To pop the return address here instead would be wrong where the
 * same call has a return probe, whose trampoline the kernel puts on top of the stack after this, or a shadow stack.
 */
static __always_inline void return_early(struct pt_regs *ctx, __u64 result, __u64 ret)
{
#if defined(__TARGET_ARCH_x86)
	ctx->rax = result;
	ctx->rip = ret;
#elif defined(__TARGET_ARCH_arm64)
	struct user_pt_regs *registers = (struct user_pt_regs *)ctx;

	registers->regs[0] = result;
	registers->pc = ret;
#endif
}
