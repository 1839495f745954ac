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
#include "kernels.h"
#include "options.h"
#include "stopping.h"

enum {
	MOST_DEVICES = 64,
	MOST_DEPTH = 4096,
	MOST_IN_GRAPH = 10000,
};

struct options {
	unsigned launches, depth; /* depth 0: only the driver's own queue holds us back */
	unsigned graph; /* kernels per launch; 0: no graph */
	struct kernels kernels;
	double host_us, seconds;
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
	CUgraphExec graph; /* NULL: launch by launch */
	uint64_t graph_ns; /* what its kernels take, one after another */
};

struct progress {
	uint64_t steps, kernels, copies;
	double gpu_seconds_requested; /* what the kernels would take, one after another, on a device of their own */
	uint64_t started_ns, next_report_ns, reported_kernels;
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
	case 'g':
		options->graph = (unsigned)option_count("--graph", optarg, 1, MOST_IN_GRAPH);
		break;
	}
}

static void parse_option(struct options *options, int letter)
{
	switch (letter) {
	case 'k':
		options->launches = (unsigned)option_count("--kernels", optarg, 1, 1000000);
		break;
	case 's':
		options->seed = option_count("--seed", optarg, 0, UINT64_MAX);
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
		if (!kernels_option(&options->kernels, letter, optarg))
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

static uint64_t kernel_length_ns(const struct worker *worker, struct kernel kernel)
{
	return kernel.ns * gpu_waves(&worker->gpu, kernel.shape);
}

static void record_graph(struct worker *worker, struct options *options)
{
	gpu_begin_graph(&worker->gpu);
	for (unsigned i = 0; i < options->graph; i++) {
		struct kernel kernel = kernels_next(&options->kernels);

		gpu_spin(&worker->gpu, kernel.function, kernel.shape, kernel.ns);
		worker->graph_ns += kernel_length_ns(worker, kernel);
	}
	worker->graph = gpu_end_graph(&worker->gpu);
}

static void open_worker(struct worker *worker, struct options *options, int ordinal)
{
	gpu_open(&worker->gpu, ordinal, options->kernels.functions);
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
		gpu_calibrate(&worker->gpu, options->kernels.shape);
	if (options->graph)
		record_graph(worker, options);
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

/* One kernel or one graph; returns what it takes on a device of its own. */
static uint64_t submit(struct worker *worker, struct options *options)
{
	struct kernel kernel;

	if (worker->graph) {
		cuda_check(cuGraphLaunch(worker->graph, worker->gpu.stream), "cuGraphLaunch");
		return worker->graph_ns;
	}
	kernel = kernels_next(&options->kernels);
	gpu_spin(&worker->gpu, kernel.function, kernel.shape, kernel.ns);
	return kernel_length_ns(worker, kernel);
}

static uint64_t launch(struct worker *worker, struct options *options)
{
	CUevent *slot = options->depth ? &worker->in_flight[worker->launched % options->depth] : NULL;
	uint64_t ns;

	if (slot && worker->launched >= options->depth)
		cuda_check(cuEventSynchronize(*slot), "cuEventSynchronize");
	ns = submit(worker, options);
	if (slot)
		cuda_check(cuEventRecord(*slot, worker->gpu.stream), "cuEventRecord");
	worker->launched++;
	return ns;
}

static void launch_step(struct worker *worker, struct options *options, struct progress *progress)
{
	cuda_check(cuCtxSetCurrent(worker->gpu.context), "cuCtxSetCurrent");
	if (options->copy_bytes) {
		cuda_check(cuMemcpyHtoDAsync(worker->batch_on_device, worker->batch, options->copy_bytes,
					     worker->gpu.stream),
			   "cuMemcpyHtoDAsync");
		progress->copies++;
	}
	for (unsigned i = 0; i < options->launches && !stop_asked; i++) {
		progress->gpu_seconds_requested += (double)launch(worker, options) / 1e9;
		progress->kernels += options->graph ? options->graph : 1;
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

static void train(struct worker *workers, struct options *options, struct progress *progress)
{
	while (!is_over(options, progress)) {
		for (unsigned device = 0; device < options->device_count; device++)
			launch_step(&workers[device], options, progress);
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
		.launches = 100,
		.kernels = KERNELS_DEFAULT(500),
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
	kernels_start(&options.kernels, options.seed);
	for (unsigned device = 0; device < options.device_count; device++)
		open_worker(&workers[device], &options, options.devices[device]);
	printf("ready\n");
	fflush(stdout);
	progress.started_ns = options.kernels.started_ns = clock_now_ns();
	progress.next_report_ns = progress.started_ns + NS_PER_SECOND;
	train(workers, &options, &progress);
	write_summary(&options, &progress, summary);
	return ferror(summary) ? 1 : 0;
}
