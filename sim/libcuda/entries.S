/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The exports as libcuda 470 to 555 begins each of its own: is the library ended already, then on through a table. The
 * comparison is an instruction that a kernel with a probe on it has to single-step. The table leads to sim_NAME for a
 * call NAME that is modelled. x86-64.
 *
 * With PLAIN, exports are the functions themselves, as in libcuda 580, and here are only those that are not modelled.
 */
#define STATE_ENDED 0x321cba00
#define DEINITIALIZED 4
#define NOT_SUPPORTED 801

	.text
not_supported:
#ifdef __x86_64__
	push	%rbp
	mov	$NOT_SUPPORTED, %eax
	pop	%rbp
	ret
#else
	mov	w0, NOT_SUPPORTED
	ret
#endif

#ifdef PLAIN
	.macro	unmodelled name, rest:vararg
	.globl	\name
	.type	\name, %function
	.set	\name, not_supported
	.endm
#else
	.bss
	.balign	4
state:
	.zero	4

	.macro	entry name, target
	.ifndef	\name
	.section .data.rel.ro, "aw"
	.balign	8
.Ltable_\name:
	.quad	\target
	.text
	.p2align 5
	.globl	\name
	.type	\name, @function
\name:
	cmpl	$STATE_ENDED, state(%rip)
	je	.Lended_\name
	jmp	*.Ltable_\name(%rip)
	.p2align 3
.Lended_\name:
	mov	$DEINITIALIZED, %eax
	ret
	.size	\name, . - \name
	.endif
	.endm

	.macro	modelled name, rest:vararg
	.hidden	sim_\name
	entry	\name, sim_\name
	.endm

	.macro	unmodelled name, rest:vararg
	entry	\name, not_supported
	.endm

#define E(name, version, export) modelled export
#define P(name, version, export, twin) modelled export; modelled twin
#include "exports.h"
#undef E
#undef P
#endif

#define E(name, version, export) unmodelled export
#define P(name, version, export, twin) unmodelled export; unmodelled twin
#include "unmodelled.h"

	.section .note.GNU-stack, "", %progbits
