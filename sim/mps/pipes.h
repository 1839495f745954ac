/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Where an MPS control daemon lives: its pipe and log directories, as the environment says. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PIPE_NAME "control"
#define PID_NAME "nvidia-cuda-mps-control.pid"
#define LOG_NAME "control.log"

/* Puts the path of a file in CUDA_MPS_PIPE_DIRECTORY (default /tmp/nvidia-mps) into `path`. */
void pipe_path(char *path, size_t length, const char *name);

/* The same for CUDA_MPS_LOG_DIRECTORY (default /var/log/nvidia-mps). */
void log_path(char *path, size_t length, const char *name);

/* The writing end of a living daemon's pipe, or -1. A pipe that a killed daemon left behind has no reader. */
int pipe_open(void);

/* Becomes the daemon, in the background unless `foreground`. Returns the program's exit status. */
int daemon_run(bool foreground);
