/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* nvidia-cuda-mps-control: starts the daemon (-d, -f), or carries out commands from standard input. */
#include <getopt.h>
#include <stdlib.h>

#include "../query.h"
#include "commands.h"
#include "pipes.h"
#include "state.h"

static int run_commands(void)
{
	int pipe = pipe_open(), server;
	char *line = NULL;
	size_t room = 0;

	if (pipe < 0) {
		fputs("Cannot find MPS control daemon process\n", stderr);
		return 1;
	}
	close(pipe);
	server = query_connect();
	if (server < 0) {
		puts("Failed to connect to the MPS control daemon: the GPU is gone");
		return 1;
	}
	while (!command_quit() && getline(&line, &room, stdin) > 0) {
		command_run(server, line);
		fflush(stdout);
	}
	free(line);
	close(server);
	return 0;
}

/* Options that it does not know are ignored to 550, and an error from 555 on. */
static int usage(void)
{
	if (release() < 555)
		return run_commands();
	puts("CUDA MPS Control for Linux/Unix.\n(simulated)\n\n  This program allows multiple CUDA processes to share "
	     "a "
	     "single GPU context.\n");
	return 1;
}

int main(int argc, char **argv)
{
	if (!release()) {
		fputs("GPUSIM_MPS_VERSION is 535, 550, 555 or 580\n", stderr);
		return 2;
	}
	opterr = 0;
	switch (getopt(argc, argv, "df")) {
	case 'd':
		return daemon_run(false);
	case 'f':
		return daemon_run(true);
	case -1:
		return run_commands();
	default:
		return usage();
	}
}
