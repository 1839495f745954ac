/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* From a descriptor of the current process to the TCP socket behind it. */
#pragma once
#include <linux/bpf.h>
#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#define CO_RE __attribute__((preserve_access_index))
#define AF_INET 2
#define AF_INET6 10
#define SOCK_STREAM 1
#define S_IFMT 0170000
#define S_IFSOCK 0140000

struct inode {
	__u16 i_mode;
} CO_RE;

struct file {
	void *private_data;
	struct inode *f_inode;
} CO_RE;

struct fdtable {
	__u32 max_fds;
	struct file **fd;
} CO_RE;

struct files_struct {
	struct fdtable *fdt;
} CO_RE;

struct atomic_count {
	int counter;
};

struct signal_struct {
	struct atomic_count live; /* threads that have not begun to exit */
} CO_RE;

struct task_struct {
	int tgid;
	struct files_struct *files;
	struct signal_struct *signal;
} CO_RE;

struct sock_common {
	__u16 skc_family;
	unsigned char skc_state;
	__u16 skc_num; /* local port in host order */
} CO_RE;

struct sock {
	struct sock_common __sk_common;
	__u16 sk_protocol;
} CO_RE;

struct tcp_sock {
	__u32 rcv_nxt; /* of what has arrived */
	__u32 copied_seq; /* of what was read */
} CO_RE;

struct socket {
	short type;
	struct sock *sk;
} CO_RE;

#define IPPROTO_TCP 6
#define TCP_CLOSE_WAIT 8 /* the end of what the other side sends has arrived, which counts as a byte */

/* Whether bytes have arrived that were not read. */
static __always_inline int bytes_wait(struct sock *sock)
{
	struct tcp_sock *tcp = (void *)sock;
	__u32 count = BPF_CORE_READ(tcp, rcv_nxt) - BPF_CORE_READ(tcp, copied_seq);

	if (BPF_CORE_READ(sock, sk_protocol) != IPPROTO_TCP) /* of MPTCP, which is another structure */
		return 0;
	return count > (BPF_CORE_READ(sock, __sk_common.skc_state) == TCP_CLOSE_WAIT);
}

static __always_inline struct file *file_at(__u32 fd)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct fdtable *table = BPF_CORE_READ(task, files, fdt);
	struct file **files = BPF_CORE_READ(table, fd), *file = NULL;

	if (fd >= BPF_CORE_READ(table, max_fds))
		return NULL;
	bpf_probe_read_kernel(&file, sizeof(file), files + fd);
	return file;
}

/* The socket at `fd`, if it is one of TCP that has this local port; else NULL. */
static __always_inline struct sock *socket_at(__u32 fd, __u16 port)
{
	struct file *file = file_at(fd);
	struct socket *socket;
	struct sock *sock;
	__u16 family;

	if (!file || (BPF_CORE_READ(file, f_inode, i_mode) & S_IFMT) != S_IFSOCK)
		return NULL;
	socket = BPF_CORE_READ(file, private_data);
	if (BPF_CORE_READ(socket, type) != SOCK_STREAM)
		return NULL;
	sock = BPF_CORE_READ(socket, sk);
	family = BPF_CORE_READ(sock, __sk_common.skc_family);
	if ((family != AF_INET && family != AF_INET6) || BPF_CORE_READ(sock, __sk_common.skc_num) != port)
		return NULL;
	return sock;
}
