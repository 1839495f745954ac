/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The control daemon. While it lives, MPS is on and its pipe exists; however it ends short of SIGKILL, both are undone.
 * Commands other than quit do not pass through it: the program that reads them asks the server itself.
 */
#include "pipes.h"

#include <fcntl.h>
#include <libgen.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/stat.h>
#include <time.h>

#include "../query.h"
#include "state.h"

static volatile sig_atomic_t ending;
static FILE *log_file;

static void on_end(int number)
{
	(void)number;
	ending = 1;
}

__attribute__((format(printf, 1, 2))) static void note(const char *format, ...)
{
	struct timespec now;
	struct tm local;
	char stamp[32];
	va_list arguments;

	clock_gettime(CLOCK_REALTIME, &now);
	localtime_r(&now.tv_sec, &local);
	strftime(stamp, sizeof(stamp), "%Y-%m-%d %H:%M:%S", &local);
	fprintf(log_file, "[%s.%03ld Control %5d] ", stamp, now.tv_nsec / 1000000, (int)getpid());
	va_start(arguments, format);
	vfprintf(log_file, format, arguments);
	va_end(arguments);
	fputc('\n', log_file);
	fflush(log_file);
}

static bool make_parent(const char *path)
{
	char copy[4096];

	snprintf(copy, sizeof(copy), "%s", path);
	if (mkdir(dirname(copy), 0755) == 0 || errno == EEXIST)
		return true;
	fprintf(stderr, "Cannot create the directory of %s: %m\n", path);
	return false;
}

static void make_file(const char *name, mode_t mode, bool fifo)
{
	char path[4096];
	int fd;

	pipe_path(path, sizeof(path), name);
	if (fifo) {
		unlink(path);
		(void)!mkfifo(path, mode);
	} else if ((fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, mode)) >= 0)
		close(fd);
	(void)!chmod(path, mode);
}

/* What lies in the directory of a real daemon. */
static int make_pipes(const char *path)
{
	if (!make_parent(path) || pipe_listen(PRIVILEGED_NAME, 0755) < 0)
		return -1;
	make_file(LOCK_NAME, 0666, false);
	make_file(LOG_PIPE_NAME, 0777, true);
	return pipe_listen(PIPE_NAME, 0666);
}

static bool open_log(bool foreground)
{
	char path[4096];

	log_file = stdout;
	if (foreground)
		return true;
	log_path(path, sizeof(path), LOG_NAME);
	if (!make_parent(path))
		return false;
	log_file = fopen(path, "ae");
	if (!log_file)
		fprintf(stderr, "Cannot write the log %s: %m\n", path);
	return log_file != NULL;
}

static bool tell_server(int server, enum query_op op)
{
	struct query query = {.op = op};
	struct answer answer;
	void *items;

	if (!query_ask(server, &query, &answer, &items))
		return false;
	free(items);
	return answer.status == 0;
}

static void write_pid(void)
{
	char path[4096];
	FILE *file;

	if (release() < 550)
		return;
	pipe_path(path, sizeof(path), PID_NAME);
	file = fopen(path, "we");
	if (!file)
		return;
	fprintf(file, "%d\n", (int)getpid());
	fclose(file);
	(void)!chmod(path, 0666);
}

static void end_on_signals(void)
{
	struct sigaction action = {.sa_handler = on_end};

	sigaction(SIGTERM, &action, NULL);
	sigaction(SIGINT, &action, NULL);
	signal(SIGPIPE, SIG_IGN);
	signal(SIGHUP, SIG_IGN);
}

static bool quit_requested(int pipe)
{
	const struct timeval patience = {.tv_sec = 1};
	char text[16] = "";
	int command = accept4(pipe, NULL, NULL, SOCK_CLOEXEC);

	if (command < 0)
		return false;
	setsockopt(command, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	(void)!read(command, text, sizeof(text) - 1);
	close(command);
	return strncmp(text, "quit", 4) == 0;
}

/* Returns when a client says quit, a signal comes, or the GPU's server goes away. */
static void serve(int pipe, int server)
{
	struct pollfd watched[] = {{.fd = pipe, .events = POLLIN}, {.fd = server, .events = POLLIN}};

	while (!ending) {
		if (poll(watched, 2, -1) < 0)
			continue;
		if (watched[1].revents) {
			note("The GPU is gone");
			return;
		}
		if (watched[0].revents && quit_requested(pipe))
			return;
	}
}

/* The sockets and the lock stay, as with a real one. Closing is last: who waits for the end tries to connect. */
static void undo(int server, int pipe)
{
	const char *const names[] = {PID_NAME, LOG_PIPE_NAME};
	char path[4096];

	tell_server(server, Q_MPS_QUIT);
	for (size_t at = 0; at < sizeof(names) / sizeof(*names); at++) {
		pipe_path(path, sizeof(path), names[at]);
		unlink(path);
	}
	close(pipe);
	note("Exit");
}

/* The connection is this process's own: the server gives up one whose opener is gone. */
static int live(int pipe, int ready)
{
	int server = query_connect();
	char path[4096];

	end_on_signals();
	pipe_path(path, sizeof(path), PIPE_NAME);
	if (server < 0 || !tell_server(server, Q_MPS_START)) {
		note("There is no GPU: is its server running?");
		return 1;
	}
	write_pid();
	note("Starting control daemon using socket %s", path);
	if (ready >= 0) {
		(void)!write(ready, "", 1);
		close(ready);
	}
	serve(pipe, server);
	undo(server, pipe);
	return 0;
}

static void detach(void)
{
	int nowhere = open("/dev/null", O_RDWR | O_CLOEXEC);

	setsid();
	dup2(nowhere, STDIN_FILENO);
	dup2(nowhere, STDOUT_FILENO);
	dup2(nowhere, STDERR_FILENO);
}

/* The parent returns when the daemon is ready for clients, so that the next command finds it. */
static int go_to_background(int pipe)
{
	int ready[2];
	char byte;
	pid_t child;

	if (pipe2(ready, O_CLOEXEC) < 0)
		return 1;
	child = fork();
	if (child < 0)
		return 1;
	if (child == 0) {
		close(ready[0]);
		detach();
		_exit(live(pipe, ready[1]));
	}
	close(ready[1]);
	if (read(ready[0], &byte, 1) == 1)
		return 0;
	fprintf(stderr, "The MPS control daemon did not start: there is no GPU (is its server running?)\n");
	return 1;
}

int daemon_run(bool foreground)
{
	char path[4096];
	int pipe = pipe_open();

	if (pipe >= 0) {
		puts("An instance of this daemon is already running");
		return 1;
	}
	if (!open_log(foreground))
		return 1;
	pipe_path(path, sizeof(path), PIPE_NAME);
	pipe = make_pipes(path);
	if (pipe < 0)
		return 1;
	return foreground ? live(pipe, -1) : go_to_background(pipe);
}
