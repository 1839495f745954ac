/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * A program whose functions return in awkward places. It prints "ready", waits for a line, does these, prints "done",
 * and ends at the end of its input:
 *   THREADS threads with a stack of STACK bytes call `leaf` CALLS times each;
 *   `forking` forks FORKS times, and returns in both processes;
 *   VFORKS processes share its memory, and call `leaf`.
 * Of its own returns there are THREADS * CALLS of `leaf` and FORKS of `forking`.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 100, CALLS = 10, FORKS = 50, VFORKS = 50, STACK = 1024, STATUS = 7 };

static char stack[STACK] __attribute__((aligned(16)));
static pid_t running; /* the thread that has the stack; the kernel clears it */

__attribute__((noinline)) int leaf(int value)
{
	asm volatile("" : "+r"(value));
	return value + 1;
}

__attribute__((noinline)) pid_t forking(void)
{
	return syscall(SYS_fork);
}

static void must(int holds, const char *what)
{
	if (holds)
		return;
	fprintf(stderr, "small_stacks: %s\n", what);
	_exit(1);
}

static int call_leaf(void *unused)
{
	int value = 0;

	(void)unused;
	for (int i = 0; i < CALLS; i++)
		value = leaf(value);
	syscall(SYS_exit, value != CALLS); /* of the thread; without the C library's, as it has no thread storage */
	return 0;
}

static void run_thread(void)
{
	int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM |
		    CLONE_PARENT_SETTID | CLONE_CHILD_CLEARTID;
	pid_t tid;

	must(clone(call_leaf, stack + STACK, flags, NULL, &running, NULL, &running) > 0, "a thread");
	while ((tid = __atomic_load_n(&running, __ATOMIC_SEQ_CST)))
		syscall(SYS_futex, &running, FUTEX_WAIT, tid, NULL, NULL, 0);
}

static void expect(pid_t pid, int expected)
{
	int status = 0;

	must(waitpid(pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == expected,
	     "a process ended in another way");
}

static void run_fork(void)
{
	pid_t pid = forking();

	if (!pid)
		_exit(STATUS);
	must(pid > 0, "a process");
	expect(pid, STATUS);
}

static void run_vfork(void)
{
	pid_t pid = vfork();

	if (!pid)
		_exit(leaf(STATUS - 1));
	expect(pid, STATUS);
}

int main(void)
{
	setbuf(stdout, NULL);
	puts("ready");
	must(getchar() == '\n', "a line");
	for (int i = 0; i < THREADS; i++)
		run_thread();
	for (int i = 0; i < FORKS; i++)
		run_fork();
	for (int i = 0; i < VFORKS; i++)
		run_vfork();
	puts("done");
	getchar();
	return 0;
}
