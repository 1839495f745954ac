/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Where an MPS control daemon lives: its pipe and log directories, as the environment says. Both pipes are sockets. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PIPE_NAME "control"
#define PRIVILEGED_NAME "control_privileged"
#define LOCK_NAME "control_lock"
#define LOG_PIPE_NAME "log"
#define PID_NAME "nvidia-cuda-mps-control.pid"
#define LOG_NAME "control.log"

/* Puts the path of a file in CUDA_MPS_PIPE_DIRECTORY (default /tmp/nvidia-mps) into `path`. */
void pipe_path(char *path, size_t length, const char *name);

/* The same for CUDA_MPS_LOG_DIRECTORY (default /var/log/nvidia-mps). */
void log_path(char *path, size_t length, const char *name);

/* A connection to the living daemon, or -1. A socket that a daemon left behind, as each does, has no listener. */
int pipe_open(void);

/* A socket with that name in the directory, listened at; or -1. */
int pipe_listen(const char *name, mode_t mode);

/* Becomes the daemon, in the background unless `foreground`. Returns the program's exit status. */
int daemon_run(bool foreground);
