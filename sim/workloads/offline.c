/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * offline: training-like steps. Each one launches many kernels without waiting, copies a batch, waits once, and spends
 * some time on the CPU. It reports how fast it went, and knows nothing of other users of the device.
 */
#include <getopt.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "clock.h"
#include "options.h"
#include "stopping.h"
#include "training.h"

enum {
	MOST_DEVICES = 64,
	MOST_IN_GRAPH = 10000,
};

struct options {
	struct work work;
	double host_us, seconds;
	uint64_t seed, steps;
	int devices[MOST_DEVICES];
	unsigned device_count;
	bool never_sync, verbose, backward;
	const char *json, *log;
};

struct progress {
	uint64_t steps, kernels, copies;
	double gpu_seconds_requested; /* what the kernels would take, one after another, on a device of their own */
	uint64_t started_ns, next_report_ns, reported_kernels;
	FILE *log; /* NULL: none */
};

static const char USAGE[] =
	"usage: offline [options]\n"
	"  --kernels N          launches per step and device (default 100)\n"
	"  --kernel-us U        length of each (default 500)\n" KERNELS_USAGE
	"  --seed N             of the kernels (default 1)\n"
	"  --graph K            each launch is a CUDA graph of K kernels, which do not drift\n"
	"  --copy-bytes N       copied to the device per step (default 0)\n"
	"  --host-us U          CPU-side pause after each step (default 0)\n"
	"  --depth N            wait for launch n - N before launching n (default: the driver's own limit)\n"
	"  --never-sync         no wait per step; one at the very end\n"
	"  --backward           another thread launches the second half of each step, as PyTorch's autograd does\n"
	"  --memory N           bytes allocated on each device at the start (default 0)\n"
	"  --device N           CUDA ordinal (default 0); --devices 0,1 for several\n"
	"  --iterations-per-us N     of the spin kernel, instead of measuring it at the start\n"
	"  --seconds S          (default 10; 0: until SIGTERM)\n"
	"  --steps N            end after N steps\n"
	"  --log FILE           a line per step, once it is done: CLOCK_MONOTONIC in ns, kernels so far\n"
	"  --json FILE          the summary (default: standard output)\n"
	"  --verbose            a line of progress per second\n";

static void parse_devices(struct options *options, char *list)
{
	char *rest = list, *item;

	options->device_count = 0;
	while ((item = strsep(&rest, ","))) {
		if (options->device_count == MOST_DEVICES) {
			fprintf(stderr, "--devices takes at most %d\n", MOST_DEVICES);
			exit(2);
		}
		options->devices[options->device_count++] = (int)option_count("--devices", item, 0, 1024);
	}
}

static void parse_run(struct options *options, int letter)
{
	switch (letter) {
	case 'm':
		options->work.memory_bytes = option_bytes("--memory", optarg);
		break;
	case 'V':
		parse_devices(options, optarg);
		break;
	case 'i':
		options->work.iterations_per_us = option_count("--iterations-per-us", optarg, 1, 1000000);
		break;
	case 'S':
		options->seconds = option_number("--seconds", optarg, 0, 1e9);
		break;
	case 'n':
		options->steps = option_count("--steps", optarg, 1, UINT64_MAX);
		break;
	case 'j':
		options->json = optarg;
		break;
	case 'l':
		options->log = optarg;
		break;
	case 'v':
		options->verbose = true;
		break;
	case 'N':
		options->never_sync = true;
		break;
	case 'B':
		options->backward = true;
		break;
	case 'g':
		options->work.graph = (unsigned)option_count("--graph", optarg, 1, MOST_IN_GRAPH);
		break;
	}
}

static void parse_option(struct options *options, int letter)
{
	switch (letter) {
	case 'k':
		options->work.launches = (unsigned)option_count("--kernels", optarg, 1, 1000000);
		break;
	case 's':
		options->seed = option_count("--seed", optarg, 0, UINT64_MAX);
		break;
	case 'c':
		options->work.copy_bytes = option_bytes("--copy-bytes", optarg);
		break;
	case 'H':
		options->host_us = option_number("--host-us", optarg, 0, 1e9);
		break;
	case 'D':
		options->work.depth = (unsigned)option_count("--depth", optarg, 1, MOST_DEPTH);
		break;
	default:
		if (!kernels_option(&options->work.kernels, letter, optarg))
			parse_run(options, letter);
	}
}

static void parse(struct options *options, int argc, char **argv)
{
	static const struct option LONG[] = {
		{"kernels", required_argument, NULL, 'k'},
		KERNELS_LONG_OPTIONS,
		{"seed", required_argument, NULL, 's'},
		{"graph", required_argument, NULL, 'g'},
		{"copy-bytes", required_argument, NULL, 'c'},
		{"host-us", required_argument, NULL, 'H'},
		{"depth", required_argument, NULL, 'D'},
		{"never-sync", no_argument, NULL, 'N'},
		{"backward", no_argument, NULL, 'B'},
		{"memory", required_argument, NULL, 'm'},
		{"device", required_argument, NULL, 'V'},
		{"devices", required_argument, NULL, 'V'},
		{"iterations-per-us", required_argument, NULL, 'i'},
		{"seconds", required_argument, NULL, 'S'},
		{"steps", required_argument, NULL, 'n'},
		{"log", required_argument, NULL, 'l'},
		{"json", required_argument, NULL, 'j'},
		{"verbose", no_argument, NULL, 'v'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	int letter;

	while ((letter = option_next(argc, argv, LONG, USAGE)) != -1)
		parse_option(options, letter);
	if (optind < argc) {
		fprintf(stderr, "what is \"%s\"? offline takes options only\n%s", argv[optind], USAGE);
		exit(2);
	}
}

static void report(const struct options *options, struct progress *progress)
{
	uint64_t now_ns = clock_now_ns();
	double elapsed_s = (double)(now_ns - progress->started_ns) / 1e9;

	if (!options->verbose || now_ns < progress->next_report_ns)
		return;
	printf("%.1f s: %lu steps, %lu kernels, %lu since the last line\n", elapsed_s, progress->steps,
	       progress->kernels, progress->kernels - progress->reported_kernels);
	fflush(stdout);
	progress->reported_kernels = progress->kernels;
	progress->next_report_ns = now_ns + NS_PER_SECOND;
}

struct step {
	struct worker *worker;
	struct options *options;
	struct progress *progress;
};

static void launch(struct step step, unsigned launches)
{
	for (unsigned i = 0; i < launches && !stop_asked; i++) {
		step.progress->gpu_seconds_requested += (double)worker_launch(step.worker, &step.options->work) / 1e9;
		step.progress->kernels += step.options->work.graph ? step.options->work.graph : 1;
		report(step.options, step.progress);
	}
}

/* A thread that lives as long as the program, launches when it is asked to, and never waits for the device. */
static struct {
	pthread_barrier_t begin, end;
	struct step step;
} backward;

static void *launch_backward(void *unused)
{
	for (;;) {
		pthread_barrier_wait(&backward.begin);
		cuda_check(cuCtxSetCurrent(backward.step.worker->gpu.context), "cuCtxSetCurrent");
		launch(backward.step, backward.step.options->work.launches / 2);
		pthread_barrier_wait(&backward.end);
	}
	return unused;
}

static void start_backward(void)
{
	pthread_t thread;

	pthread_barrier_init(&backward.begin, NULL, 2);
	pthread_barrier_init(&backward.end, NULL, 2);
	if (pthread_create(&thread, NULL, launch_backward, NULL) != 0)
		exit(1);
}

static void launch_step(struct step step)
{
	unsigned launches = step.options->work.launches;

	worker_begin(step.worker, &step.options->work);
	step.progress->copies++;
	if (!step.options->backward) {
		launch(step, launches);
		return;
	}
	launch(step, launches - launches / 2);
	backward.step = step;
	pthread_barrier_wait(&backward.begin);
	pthread_barrier_wait(&backward.end);
}

static void wait_for_all(struct worker *workers, const struct options *options)
{
	for (unsigned device = 0; device < options->device_count; device++) {
		cuda_check(cuCtxSetCurrent(workers[device].gpu.context), "cuCtxSetCurrent");
		gpu_wait(&workers[device].gpu);
	}
}

static void log_step(const struct progress *progress)
{
	if (!progress->log)
		return;
	fprintf(progress->log, "%lu %lu\n", clock_now_ns(), progress->kernels);
	fflush(progress->log); /* a reader of the log sees each step as it ends */
}

static bool is_over(const struct options *options, const struct progress *progress)
{
	double elapsed_s = (double)(clock_now_ns() - progress->started_ns) / 1e9;

	return stop_asked || (options->seconds > 0 && elapsed_s >= options->seconds) ||
	       (options->steps && progress->steps >= options->steps);
}

static void train(struct worker *workers, struct options *options, struct progress *progress)
{
	while (!is_over(options, progress)) {
		for (unsigned device = 0; device < options->device_count; device++)
			launch_step((struct step){&workers[device], options, progress});
		if (!options->never_sync)
			wait_for_all(workers, options);
		progress->steps++;
		log_step(progress);
		report(options, progress);
		if (options->host_us > 0)
			clock_sleep_until_ns(clock_now_ns() + (uint64_t)(options->host_us * 1e3));
	}
	wait_for_all(workers, options);
}

static void write_summary(const struct options *options, const struct progress *progress, const struct worker *first,
			  FILE *file)
{
	double elapsed_s = (double)(clock_now_ns() - progress->started_ns) / 1e9;

	fprintf(file, "{\"program\": \"offline\", \"steps\": %lu, \"kernels\": %lu, \"elapsed_seconds\": %.9f,\n",
		progress->steps, progress->kernels, elapsed_s);
	fprintf(file, " \"kernels_per_second\": %.6f, \"gpu_seconds_requested\": %.6f,\n",
		(double)progress->kernels / elapsed_s, progress->gpu_seconds_requested);
	fprintf(file, " \"copied_bytes\": %lu, \"started_monotonic_ns\": %lu, \"iterations_per_us\": %lu}\n",
		progress->copies * options->work.copy_bytes, progress->started_ns, first->gpu.iterations_per_us);
	fflush(file);
}

static FILE *open_for_writing(const char *path)
{
	FILE *file = fopen(path, "we");

	if (!file) {
		fprintf(stderr, "cannot write %s: %m\n", path);
		exit(2);
	}
	return file;
}

int main(int argc, char **argv)
{
	struct options options = {
		.work = {.launches = 100, .kernels = KERNELS_DEFAULT(500)},
		.seconds = 10,
		.seed = 1,
		.device_count = 1,
	};
	struct progress progress = {0};
	struct worker *workers;
	FILE *summary = stdout;

	parse(&options, argc, argv);
	stop_on_signals();
	prctl(PR_SET_TIMERSLACK, 1); /* the host's part of a step is to be as long as was asked */
	if (options.json)
		summary = open_for_writing(options.json);
	if (options.log)
		progress.log = open_for_writing(options.log);
	workers = calloc(options.device_count, sizeof(*workers));
	if (!workers)
		return 1;
	kernels_start(&options.work.kernels, options.seed);
	for (unsigned device = 0; device < options.device_count; device++)
		worker_open(&workers[device], &options.work, options.devices[device]);
	if (options.backward)
		start_backward();
	printf("ready\n");
	fflush(stdout);
	progress.started_ns = options.work.kernels.started_ns = clock_now_ns();
	progress.next_report_ns = progress.started_ns + NS_PER_SECOND;
	train(workers, &options, &progress);
	write_summary(&options, &progress, workers, summary);
	return ferror(summary) ? 1 : 0;
}
