/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Which processes under seccomp survive being watched: `guest FOLDER OFFSET` attaches the programs of
 * FOLDER/uprobe.bpf.o, first at entries alone, then at returns, too, and runs each target each time. Prints a line
 * "PROBES TARGET STATUS RETURNS" for each: the exit status, or minus the signal, and how many returns were seen.
 * FOLDER/trial is the agent's own trial, whose function is at OFFSET of the file.
 */
#define _GNU_SOURCE
#include "wait.h"
#include "uprobe.h"

#include <bpf/bpf.h>
#include <bpf/libbpf.h>
#include <dlfcn.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { CALLS = 5, NUMBER = 1, FIRST_UNKNOWN = 335, FIRST_KNOWN_AGAIN = 424 };

static struct bpf_object *object;
static const char *folder;

/* What is probed: on an instruction that is emulated, and on one that newer kernels turn into a call. */
__attribute__((naked, noinline, visibility("default"))) void on_push(void)
{
	asm("push %rbp; pop %rbp; ret");
}

__attribute__((naked, noinline, visibility("default"))) void on_nop5(void)
{
	asm(".byte 0x0f, 0x1f, 0x44, 0, 0; ret");
}

static void must(int holds, const char *what)
{
	if (holds)
		return;
	printf("FAILED %s: %s\nEND\n", what, strerror(errno));
	exit(1);
}

/* ---- what the targets put themselves under ---- */

static void put_under(struct sock_filter *filter, unsigned short length)
{
	struct sock_fprog program = {.len = length, .filter = filter};

	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0))
		_exit(2);
}

#define NUMBER_OF_CALL BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))
#define RETURN(what) BPF_STMT(BPF_RET | BPF_K, what)

/* A runtime's default profile that is older than the call: what it does not know fails. */
static void refuse_unknown(int error)
{
	struct sock_filter filter[] = {
		NUMBER_OF_CALL,
		BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, FIRST_UNKNOWN, 0, 2),
		BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, FIRST_KNOWN_AGAIN, 1, 0),
		RETURN(SECCOMP_RET_ERRNO | error),
		RETURN(SECCOMP_RET_ALLOW),
	};

	put_under(filter, sizeof(filter) / sizeof(filter[0]));
}

static void under_nothing(void)
{
}

static void under_default_profile(void)
{
	refuse_unknown(EPERM);
}

static void under_newer_default_profile(void)
{
	refuse_unknown(ENOSYS);
}

static void allow_only(unsigned int otherwise)
{
	struct sock_filter filter[] = {
		NUMBER_OF_CALL,
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit, 1, 0),
		RETURN(otherwise),
		RETURN(SECCOMP_RET_ALLOW),
	};

	put_under(filter, sizeof(filter) / sizeof(filter[0]));
}

static void under_allow_list(void)
{
	allow_only(SECCOMP_RET_KILL_PROCESS);
}

static void under_trapping_list(void)
{
	allow_only(SECCOMP_RET_TRAP);
}

static void under_strict_mode(void)
{
	if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT, 0, 0, 0))
		_exit(2);
}

static const struct target {
	const char *name;
	void (*enter)(void);
} targets[] = {
	{"none", under_nothing},
	{"default", under_default_profile},
	{"default-enosys", under_newer_default_profile},
	{"allow-list", under_allow_list},
	{"trap", under_trapping_list},
	{"strict", under_strict_mode},
};

/* ---- running them, followed ---- */

static int map(const char *name)
{
	int fd = bpf_object__find_map_fd_by_name(object, name);

	must(fd >= 0, name);
	return fd;
}

static void follow(pid_t pid)
{
	struct watched watched = {NUMBER, NUMBER};
	static struct latency none;
	__u32 tgid = pid, number = NUMBER;

	must(!bpf_map_update_elem(map("recorded"), &number, &none, BPF_ANY), "the record");
	must(!bpf_map_update_elem(map("wanted"), &tgid, &watched, BPF_ANY), "the process");
}

static void report(const char *probes, const char *name, pid_t pid, int go)
{
	static struct latency latency;
	__u32 number = NUMBER;
	int status;

	follow(pid);
	must(write(go, "", 1) == 1, "it begins");
	close(go);
	must(waitpid(pid, &status, 0) == pid, "it ends");
	must(!bpf_map_lookup_elem(map("recorded"), &number, &latency), "the record is there");
	printf("%s %s %d %llu\n", probes, name, WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status),
	       (unsigned long long)latency.count);
}

static void run_target(const char *probes, const struct target *target, void (*function)(void))
{
	int ends[2];
	char byte;
	pid_t pid;

	must(!pipe(ends), "a pipe");
	pid = fork();
	if (!pid) {
		if (read(ends[0], &byte, 1) != 1)
			_exit(3);
		target->enter();
		for (int i = 0; i < CALLS; i++)
			function();
		syscall(SYS_exit, 0);
	}
	close(ends[0]);
	report(probes, target->name, pid, ends[1]);
}

static void run_all(const char *probes, void (*function)(void))
{
	for (unsigned int i = 0; i < sizeof(targets) / sizeof(targets[0]); i++)
		run_target(probes, &targets[i], function);
}

static void run_trial(const char *path, const char *name, const char *second)
{
	int ends[2];
	pid_t pid;

	must(!pipe(ends), "a pipe");
	pid = fork();
	if (!pid) {
		dup2(ends[0], 0);
		close(ends[1]);
		execl(path, name, second, NULL);
		_exit(4);
	}
	close(ends[0]);
	report("trial", name, pid, ends[1]);
}

/* ---- attaching ---- */

static void attach(const char *name, const char *path, unsigned long offset, int at_return)
{
	struct bpf_program *program = bpf_object__find_program_by_name(object, name);
	LIBBPF_OPTS(bpf_uprobe_opts, options, .retprobe = at_return, .bpf_cookie = NUMBER);

	must(program && bpf_program__attach_uprobe_opts(program, -1, path, offset, &options), name);
}

static unsigned long offset_of(void (*function)(void))
{
	Dl_info where;

	must(dladdr((void *)function, &where), "the function is in this program");
	return (char *)function - (char *)where.dli_fbase;
}

int main(int argc, char **argv)
{
	char path[256], self[256] = {};

	setbuf(stdout, NULL);
	must(argc == 3 && readlink("/proc/self/exe", self, sizeof(self) - 1) > 0, "a folder and an offset are named");
	folder = argv[1];
	snprintf(path, sizeof(path), "%s/uprobe.bpf.o", folder);
	object = bpf_object__open_file(path, NULL);
	must(object && !bpf_object__load(object), path);
	attach("uprobe_enter", self, offset_of(on_push), 0);
	attach("uprobe_enter", self, offset_of(on_nop5), 0);
	run_all("entry", on_push);
	run_all("entry-nop5", on_nop5);
	attach("uprobe_return", self, offset_of(on_push), 1);
	run_all("return", on_push);
	snprintf(path, sizeof(path), "%s/trial", folder);
	attach("uprobe_return", path, strtoul(argv[2], NULL, 10), 1);
	attach("uprobe_enter", path, strtoul(argv[2], NULL, 10), 0);
	run_trial(path, "strict", NULL);
	run_trial(path, "own", "filter");
	puts("END");
	return 0;
}
