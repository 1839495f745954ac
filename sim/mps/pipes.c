/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "pipes.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static void path_in(char *path, size_t length, const char *variable, const char *fallback, const char *name)
{
	const char *directory = getenv(variable);

	snprintf(path, length, "%s/%s", directory && *directory ? directory : fallback, name);
}

void pipe_path(char *path, size_t length, const char *name)
{
	path_in(path, length, "CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps", name);
}

void log_path(char *path, size_t length, const char *name)
{
	path_in(path, length, "CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps", name);
}

/* The address goes over the directory's descriptor: a path is often longer than an address may be. */
static int socket_in(const char *name, int (*use)(int fd, const struct sockaddr *address, socklen_t length))
{
	struct sockaddr_un address = {.sun_family = AF_UNIX};
	char path[4096];
	int directory, fd, error;

	pipe_path(path, sizeof(path), "");
	directory = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (directory < 0)
		return -1;
	snprintf(address.sun_path, sizeof(address.sun_path), "/proc/self/fd/%d/%s", directory, name);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (fd >= 0 && use(fd, (const struct sockaddr *)&address, sizeof(address)) < 0) {
		error = errno;
		close(fd);
		errno = error;
		fd = -1;
	}
	close(directory);
	return fd;
}

int pipe_open(void)
{
	return socket_in(PIPE_NAME, connect);
}

int pipe_listen(const char *name, mode_t mode)
{
	char path[4096];
	int fd;

	pipe_path(path, sizeof(path), name);
	unlink(path); /* what an earlier daemon left behind; a living one was looked for before */
	fd = socket_in(name, bind);
	if (fd < 0 || chmod(path, mode) < 0 || listen(fd, SOMAXCONN) < 0) {
		fprintf(stderr, "Cannot create the pipe %s: %m\n", path);
		return -1;
	}
	return fd;
}
