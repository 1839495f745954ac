/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* nvidia-cuda-mps-control: starts the daemon (-d, -f), or carries out commands from standard input. */
#include <getopt.h>
#include <stdlib.h>

#include "../query.h"
#include "commands.h"
#include "pipes.h"

static int run_commands(void)
{
	int pipe = pipe_open(), server;
	char *line = NULL;
	size_t room = 0;
	bool fine = true;

	if (pipe < 0) {
		puts("Cannot find MPS control daemon process");
		return 1;
	}
	close(pipe);
	server = query_connect();
	if (server < 0) {
		puts("Failed to connect to the MPS control daemon: the GPU is gone");
		return 1;
	}
	while (!command_quit() && getline(&line, &room, stdin) > 0) {
		fine = command_run(server, line) && fine;
		fflush(stdout);
	}
	free(line);
	close(server);
	return fine ? 0 : 1;
}

int main(int argc, char **argv)
{
	switch (getopt(argc, argv, "df")) {
	case 'd':
		return daemon_run(false);
	case 'f':
		return daemon_run(true);
	case -1:
		return run_commands();
	default:
		fprintf(stderr, "Usage: nvidia-cuda-mps-control [-d | -f]\n");
		return 1;
	}
}
