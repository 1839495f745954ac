/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Who may signal a container that AppArmor confines: `guest FOLDER` loads FOLDER/profiles, and for each sender and each
 * target that is stopped prints "SENDER TARGET EXISTS CONTINUES STATE": 1 or 0 where signal 0 and SIGCONT are allowed,
 * and the target's state afterwards. Then "END".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define UNCONFINED "unconfined"

static void fail(const char *what)
{
	printf("%s: %s\n", what, strerror(errno));
	exit(1);
}

static void write_file(const char *path, const char *content, size_t length)
{
	int fd = open(path, O_WRONLY);

	if (fd < 0 || write(fd, content, length) != (ssize_t)length)
		fail(path);
	close(fd);
}

static void load_profiles(const char *folder)
{
	static char content[1 << 20];
	char path[256];
	ssize_t length;
	int fd;

	snprintf(path, sizeof(path), "%s/profiles", folder);
	fd = open(path, O_RDONLY);
	length = fd < 0 ? -1 : read(fd, content, sizeof(content));
	if (length <= 0)
		fail(path);
	close(fd);
	if (mount("s", "/sys/kernel/security", "securityfs", 0, NULL) && errno != EBUSY)
		fail("securityfs");
	write_file("/sys/kernel/security/apparmor/.replace", content, length);
}

static void enter(const char *profile)
{
	char order[64];

	if (!strcmp(profile, UNCONFINED))
		return;
	write_file("/proc/self/attr/current", order, snprintf(order, sizeof(order), "changeprofile %s", profile));
}

static pid_t start_stopped(const char *profile)
{
	pid_t child = fork();

	if (child == 0) {
		enter(profile);
		raise(SIGSTOP);
		for (;;)
			pause();
	}
	if (child < 0 || waitpid(child, NULL, WUNTRACED) != child)
		fail("a target");
	return child;
}

static int allowed(int pidfd, int number)
{
	if (!syscall(SYS_pidfd_send_signal, pidfd, number, NULL, 0))
		return 1;
	if (errno != EACCES && errno != EPERM)
		fail("a signal");
	return 0;
}

static char state_of(pid_t pid)
{
	char path[64], state = '?';
	FILE *file;

	snprintf(path, sizeof(path), "/proc/%d/stat", pid);
	file = fopen(path, "r");
	if (!file || fscanf(file, "%*d %*s %c", &state) != 1)
		fail(path);
	fclose(file);
	return state;
}

static void try(const char *sender, const char *target)
{
	pid_t stopped = start_stopped(target), child = fork();

	if (child == 0) {
		int pidfd = syscall(SYS_pidfd_open, stopped, 0), exists;

		enter(sender);
		exists = allowed(pidfd, 0);
		printf("%s %s %d %d ", sender, target, exists, allowed(pidfd, SIGCONT));
		exit(0);
	}
	if (child < 0 || waitpid(child, NULL, 0) != child)
		fail("a sender");
	printf("%c\n", state_of(stopped));
	kill(stopped, SIGKILL);
	waitpid(stopped, NULL, 0);
}

int main(int argc, char **argv)
{
	static const char *const names[] = {UNCONFINED, "agent", "container"};

	setbuf(stdout, NULL);
	if (argc != 2)
		return 2;
	load_profiles(argv[1]);
	for (int sender = 0; sender < 3; sender++)
		for (int target = 0; target < 3; target++)
			try(names[sender], names[target]);
	puts("END");
	return 0;
}
