/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* System calls that move bytes: which descriptor, which way, and where in the program's memory the bytes are. */
#pragma once
#include <linux/bpf.h>
#include <linux/ptrace.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#include "http_connection.h"

/* The kernel's own headers give a BPF target the numbers of a 32-bit machine. */
#if defined(__TARGET_ARCH_x86)
enum http_number {
	NR_READ = 0,
	NR_WRITE = 1,
	NR_READV = 19,
	NR_WRITEV = 20,
	NR_SENDFILE = 40,
	NR_ACCEPT = 43,
	NR_SENDTO = 44,
	NR_RECVFROM = 45,
	NR_SENDMSG = 46,
	NR_RECVMSG = 47,
	NR_SPLICE = 275,
	NR_ACCEPT4 = 288,
	NR_RECVMMSG = 299,
	NR_SENDMMSG = 307,
	NR_PREADV2 = 327,
	NR_PWRITEV2 = 328,
};
#else
enum http_number {
	NR_READ = 63,
	NR_WRITE = 64,
	NR_READV = 65,
	NR_WRITEV = 66,
	NR_SENDFILE = 71,
	NR_SPLICE = 76,
	NR_ACCEPT = 202,
	NR_SENDTO = 206,
	NR_RECVFROM = 207,
	NR_SENDMSG = 211,
	NR_RECVMSG = 212,
	NR_ACCEPT4 = 242,
	NR_RECVMMSG = 243,
	NR_SENDMMSG = 269,
	NR_PREADV2 = 286,
	NR_PWRITEV2 = 287,
};
#endif

#define HTTP_MSG_OOB 0x1
#define HTTP_MSG_PEEK 0x2
#define HTTP_MSG_TRUNC 0x20
#define HTTP_MSG_ERRQUEUE 0x2000

#define HTTP_NO_FD 0xffffffffu

enum http_shape {
	HTTP_NOTHING, /* moves no bytes of a stream */
	HTTP_ACCEPTS,
	HTTP_BUFFER, /* one piece of memory */
	HTTP_VECTOR, /* several, `count` of them */
	HTTP_MESSAGE, /* a msghdr, which has several */
	HTTP_OPAQUE, /* not through the program's memory */
	HTTP_UNCOUNTED, /* nor is it known how many */
};

struct http_arguments {
	__u64 number;
	__u64 first;
	__u64 second;
	__u64 third;
	__u64 fourth;
};

struct http_call {
	__u32 fd;
	__u32 other_fd; /* of splice: what is read; HTTP_NO_FD: there is none */
	__u32 side; /* enum http_side */
	__u32 shape; /* enum http_shape */
	__u64 memory;
	__u64 count;
};

#if defined(__TARGET_ARCH_x86)
#define USER_CS 0x33 /* of 64-bit programs: others number their calls differently */

static __always_inline int read_call_arguments(struct http_arguments *arguments, const void *registers)
{
	struct pt_regs copy;

	if (bpf_probe_read_kernel(&copy, sizeof(copy), registers) || (copy.cs & 0xffff) != USER_CS)
		return 0;
	*arguments = (struct http_arguments){copy.orig_rax, copy.rdi, copy.rsi, copy.rdx, copy.r10};
	return 1;
}
#else
#define PSTATE_32 0x10

struct pt_regs___arm64 {
	__u64 regs[31];
	__u64 pstate;
	__u64 orig_x0; /* the result is where the first argument was */
	__s32 syscallno;
} __attribute__((preserve_access_index));

static __always_inline int read_call_arguments(struct http_arguments *arguments, const void *registers)
{
	const struct pt_regs___arm64 *found = registers;

	if (BPF_CORE_READ(found, pstate) & PSTATE_32)
		return 0;
	arguments->number = BPF_CORE_READ(found, syscallno);
	arguments->first = BPF_CORE_READ(found, orig_x0);
	arguments->second = BPF_CORE_READ(found, regs[1]);
	arguments->third = BPF_CORE_READ(found, regs[2]);
	arguments->fourth = BPF_CORE_READ(found, regs[3]);
	return 1;
}
#endif

static __always_inline void describe(struct http_call *call, __u32 side, __u32 shape)
{
	call->side = side;
	call->shape = shape;
}

/* What is only looked at, or comes beside the stream, will be or is not part of it. */
static __always_inline void describe_receive(struct http_call *call, __u32 shape, __u64 flags)
{
	if (flags & (HTTP_MSG_PEEK | HTTP_MSG_OOB | HTTP_MSG_ERRQUEUE))
		return;
	describe(call, HTTP_READ, flags & HTTP_MSG_TRUNC ? HTTP_OPAQUE : shape);
}

static __always_inline void describe_call(struct http_call *call, const struct http_arguments *arguments)
{
	*call = (struct http_call){
		.fd = arguments->first, .other_fd = HTTP_NO_FD, .memory = arguments->second, .count = arguments->third};
	switch (arguments->number) {
	case NR_READ:
		return describe(call, HTTP_READ, HTTP_BUFFER);
	case NR_RECVFROM:
		return describe_receive(call, HTTP_BUFFER, arguments->fourth);
	case NR_READV:
	case NR_PREADV2:
		return describe(call, HTTP_READ, HTTP_VECTOR);
	case NR_RECVMSG:
		return describe_receive(call, HTTP_MESSAGE, arguments->third);
	case NR_RECVMMSG:
		return describe(call, HTTP_READ, HTTP_UNCOUNTED);
	case NR_WRITE:
	case NR_SENDTO:
		return describe(call, HTTP_WRITE, HTTP_BUFFER);
	case NR_WRITEV:
	case NR_PWRITEV2:
		return describe(call, HTTP_WRITE, HTTP_VECTOR);
	case NR_SENDMSG:
		return describe(call, HTTP_WRITE, HTTP_MESSAGE);
	case NR_SENDMMSG:
		return describe(call, HTTP_WRITE, HTTP_UNCOUNTED);
	case NR_SENDFILE:
		return describe(call, HTTP_WRITE, HTTP_OPAQUE);
	case NR_SPLICE:
		call->fd = arguments->third;
		call->other_fd = arguments->first;
		return describe(call, HTTP_WRITE, HTTP_OPAQUE);
	case NR_ACCEPT:
	case NR_ACCEPT4:
		return describe(call, HTTP_READ, HTTP_ACCEPTS);
	}
}
