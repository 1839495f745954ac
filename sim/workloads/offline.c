/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * offline: training-like steps. Each one launches many kernels without waiting, copies a batch, waits once, and spends
 * some time on the CPU. It reports how fast it went, and knows nothing of whoever shares the device.
 */
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "arrivals.h"
#include "clock.h"
#include "gpu.h"
#include "options.h"
#include "stopping.h"

enum {
	MOST_DEVICES = 64,
	MOST_DEPTH = 4096,
};

struct options {
	unsigned kernels, depth; /* depth 0: only the driver's own queue holds us back */
	double kernel_us, jitter_ratio, host_us, seconds;
	struct shape shape;
	uint64_t copy_bytes, memory_bytes, seed, steps, iterations_per_us;
	int devices[MOST_DEVICES];
	unsigned device_count;
	bool never_sync, verbose;
	const char *json;
};

struct worker { /* one device's part of every step */
	struct gpu gpu;
	CUdeviceptr memory, batch_on_device;
	void *batch;
	CUevent in_flight[MOST_DEPTH]; /* a ring: launch n is followed by event n modulo depth */
	uint64_t launched;
};

struct progress {
	uint64_t steps, kernels, copies;
	double gpu_seconds_requested; /* what the kernels would take, one after another, on a device of their own */
	uint64_t started_ns, next_report_ns, reported_kernels;
};

static const char USAGE[] =
	"usage: offline [options]\n"
	"  --kernels N          launches per step and device (default 100)\n"
	"  --kernel-us U        length of each (default 500)\n"
	"  --jitter R           each length is off by up to this ratio, 0 to 1 (default 0)\n"
	"  --seed N             of the jitter (default 1)\n"
	"  --blocks B --threads T    of each launch (default 132 × 1024)\n"
	"  --copy-bytes N       copied to the device per step (default 0)\n"
	"  --host-us U          CPU-side pause after each step (default 0)\n"
	"  --depth N            wait for launch n - N before launching n (default: the driver's own limit)\n"
	"  --never-sync         no wait per step; one at the very end\n"
	"  --memory N           bytes allocated on each device at the start (default 0)\n"
	"  --device N           CUDA ordinal (default 0); --devices 0,1 for several\n"
	"  --iterations-per-us N     of the spin kernel, instead of measuring it at the start\n"
	"  --seconds S          (default 10; 0: until SIGTERM)\n"
	"  --steps N            end after N steps\n"
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
		options->memory_bytes = option_bytes("--memory", optarg);
		break;
	case 'V':
		parse_devices(options, optarg);
		break;
	case 'i':
		options->iterations_per_us = option_count("--iterations-per-us", optarg, 1, 1000000);
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
	case 'v':
		options->verbose = true;
		break;
	case 'N':
		options->never_sync = true;
		break;
	}
}

static void parse_option(struct options *options, int letter)
{
	switch (letter) {
	case 'k':
		options->kernels = (unsigned)option_count("--kernels", optarg, 1, 1000000);
		break;
	case 'u':
		options->kernel_us = option_number("--kernel-us", optarg, 0, 1e9);
		break;
	case 'J':
		options->jitter_ratio = option_number("--jitter", optarg, 0, 1);
		break;
	case 's':
		options->seed = option_count("--seed", optarg, 0, UINT64_MAX);
		break;
	case 'b':
		options->shape.blocks = (unsigned)option_count("--blocks", optarg, 1, INT32_MAX);
		break;
	case 't':
		options->shape.threads = (unsigned)option_count("--threads", optarg, 1, 1024);
		break;
	case 'c':
		options->copy_bytes = option_bytes("--copy-bytes", optarg);
		break;
	case 'H':
		options->host_us = option_number("--host-us", optarg, 0, 1e9);
		break;
	case 'D':
		options->depth = (unsigned)option_count("--depth", optarg, 1, MOST_DEPTH);
		break;
	default:
		parse_run(options, letter);
	}
}

static void parse(struct options *options, int argc, char **argv)
{
	static const struct option LONG[] = {
		{"kernels", required_argument, NULL, 'k'},
		{"kernel-us", required_argument, NULL, 'u'},
		{"jitter", required_argument, NULL, 'J'},
		{"seed", required_argument, NULL, 's'},
		{"blocks", required_argument, NULL, 'b'},
		{"threads", required_argument, NULL, 't'},
		{"copy-bytes", required_argument, NULL, 'c'},
		{"host-us", required_argument, NULL, 'H'},
		{"depth", required_argument, NULL, 'D'},
		{"never-sync", no_argument, NULL, 'N'},
		{"memory", required_argument, NULL, 'm'},
		{"device", required_argument, NULL, 'V'},
		{"devices", required_argument, NULL, 'V'},
		{"iterations-per-us", required_argument, NULL, 'i'},
		{"seconds", required_argument, NULL, 'S'},
		{"steps", required_argument, NULL, 'n'},
		{"json", required_argument, NULL, 'j'},
		{"verbose", no_argument, NULL, 'v'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	int letter;

	while ((letter = getopt_long(argc, argv, "", LONG, NULL)) != -1) {
		if (letter == '?' || letter == 'h') {
			fputs(USAGE, letter == 'h' ? stdout : stderr);
			exit(letter == 'h' ? 0 : 2);
		}
		parse_option(options, letter);
	}
	if (optind < argc) {
		fprintf(stderr, "what is \"%s\"? offline takes options only\n%s", argv[optind], USAGE);
		exit(2);
	}
}

static void open_worker(struct worker *worker, const struct options *options, int ordinal)
{
	gpu_open(&worker->gpu, ordinal);
	if (options->memory_bytes)
		cuda_check(cuMemAlloc(&worker->memory, options->memory_bytes), "cuMemAlloc");
	if (options->copy_bytes) {
		cuda_check(cuMemAlloc(&worker->batch_on_device, options->copy_bytes), "cuMemAlloc");
		cuda_check(cuMemAllocHost(&worker->batch, options->copy_bytes), "cuMemAllocHost");
	}
	for (unsigned slot = 0; slot < options->depth; slot++)
		cuda_check(cuEventCreate(&worker->in_flight[slot], CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING),
			   "cuEventCreate");
	if (options->iterations_per_us)
		worker->gpu.iterations_per_us = options->iterations_per_us;
	else
		gpu_calibrate(&worker->gpu, options->shape);
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

static void launch(struct worker *worker, const struct options *options, uint64_t ns)
{
	CUevent *slot = options->depth ? &worker->in_flight[worker->launched % options->depth] : NULL;

	if (slot && worker->launched >= options->depth)
		cuda_check(cuEventSynchronize(*slot), "cuEventSynchronize");
	gpu_spin(&worker->gpu, options->shape, ns);
	if (slot)
		cuda_check(cuEventRecord(*slot, worker->gpu.stream), "cuEventRecord");
	worker->launched++;
}

static void launch_step(struct worker *worker, const struct options *options, struct progress *progress,
			uint64_t *random)
{
	unsigned waves = gpu_waves(&worker->gpu, options->shape);

	cuda_check(cuCtxSetCurrent(worker->gpu.context), "cuCtxSetCurrent");
	if (options->copy_bytes) {
		cuda_check(cuMemcpyHtoDAsync(worker->batch_on_device, worker->batch, options->copy_bytes,
					     worker->gpu.stream),
			   "cuMemcpyHtoDAsync");
		progress->copies++;
	}
	for (unsigned kernel = 0; kernel < options->kernels && !stop_asked; kernel++) {
		double off_ratio = options->jitter_ratio * (2 * random_uniform(random) - 1);
		uint64_t ns = (uint64_t)(options->kernel_us * 1e3 * (1 + off_ratio));

		launch(worker, options, ns);
		progress->kernels++;
		progress->gpu_seconds_requested += (double)ns * waves / 1e9;
		report(options, progress);
	}
}

static void wait_for_all(struct worker *workers, const struct options *options)
{
	for (unsigned device = 0; device < options->device_count; device++) {
		cuda_check(cuCtxSetCurrent(workers[device].gpu.context), "cuCtxSetCurrent");
		gpu_wait(&workers[device].gpu);
	}
}

static bool is_over(const struct options *options, const struct progress *progress)
{
	double elapsed_s = (double)(clock_now_ns() - progress->started_ns) / 1e9;

	return stop_asked || (options->seconds > 0 && elapsed_s >= options->seconds) ||
	       (options->steps && progress->steps >= options->steps);
}

static void train(struct worker *workers, const struct options *options, struct progress *progress)
{
	uint64_t random = options->seed;

	while (!is_over(options, progress)) {
		for (unsigned device = 0; device < options->device_count; device++)
			launch_step(&workers[device], options, progress, &random);
		if (!options->never_sync)
			wait_for_all(workers, options);
		progress->steps++;
		report(options, progress);
		if (options->host_us > 0)
			clock_sleep_until_ns(clock_now_ns() + (uint64_t)(options->host_us * 1e3));
	}
	wait_for_all(workers, options);
}

static void write_summary(const struct options *options, const struct progress *progress, FILE *file)
{
	double elapsed_s = (double)(clock_now_ns() - progress->started_ns) / 1e9;

	fprintf(file, "{\"program\": \"offline\", \"steps\": %lu, \"kernels\": %lu, \"elapsed_seconds\": %.9f,\n",
		progress->steps, progress->kernels, elapsed_s);
	fprintf(file, " \"kernels_per_second\": %.6f, \"gpu_seconds_requested\": %.6f,\n",
		(double)progress->kernels / elapsed_s, progress->gpu_seconds_requested);
	fprintf(file, " \"copied_bytes\": %lu, \"started_monotonic_ns\": %lu}\n",
		progress->copies * options->copy_bytes, progress->started_ns);
	fflush(file);
}

int main(int argc, char **argv)
{
	struct options options = {
		.kernels = 100,
		.kernel_us = 500,
		.shape = {.blocks = 132, .threads = 1024},
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
	if (options.json && !(summary = fopen(options.json, "we"))) {
		fprintf(stderr, "cannot write %s: %m\n", options.json);
		return 2;
	}
	workers = calloc(options.device_count, sizeof(*workers));
	if (!workers)
		return 1;
	for (unsigned device = 0; device < options.device_count; device++)
		open_worker(&workers[device], &options, options.devices[device]);
	printf("ready\n");
	fflush(stdout);
	progress.started_ns = clock_now_ns();
	progress.next_report_ns = progress.started_ns + NS_PER_SECOND;
	train(workers, &options, &progress);
	write_summary(&options, &progress, summary);
	return ferror(summary) ? 1 : 0;
}
