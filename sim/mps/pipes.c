/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "pipes.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>

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

int pipe_open(void)
{
	char path[4096];

	pipe_path(path, sizeof(path), PIPE_NAME);
	return open(path, O_WRONLY | O_NONBLOCK | O_CLOEXEC);
}
