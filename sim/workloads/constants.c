/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * constants: what a GPU and its driver take for the smallest things, one after another on an idle device: a launch, a
 * kernel, a wait, a copy, and how much fits into a stream. As JSON.
 */
#include <getopt.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#include "clock.h"
#include "gpu.h"
#include "options.h"

enum {
	LAUNCHES = 500, /* fewer than fit into a stream */
	MOST_LAUNCHES = 5000, /* until a stream counts as without an end */
	MOST_ROUNDS = 1000,
	LENGTHS = 4,
};

static const struct shape ONE = {.blocks = 1, .threads = 32};
static const struct shape WAVE = {.blocks = 132, .threads = 1024};
static const struct shape RAGGED = {.blocks = 284, .threads = 1024};
static const uint64_t RAGGED_NS = 50000;
static const uint64_t LENGTH_NS[LENGTHS] = {10000, 100000, 1000000, 10000000};
static const uint64_t LEAST_COVER_NS = 200000;
static const uint64_t HOLD_NS = 20000000; /* what is launched meanwhile waits in the stream */
static const uint64_t LONG_HOLD_NS = 100000000;
static const uint64_t BLOCKED_NS = 20000000; /* a launch that takes so long waited for room */
static const size_t COPY_BYTES = 64 << 20;

static const char EMPTY_PTX[] = ".visible .entry empty()\n"
				"{\n"
				"	ret;\n"
				"}\n";

struct bench {
	struct gpu gpu;
	CUfunction empty;
	CUevent from, to;
	unsigned rounds;
};

static const char USAGE[] = "usage: constants [options]\n"
			    "  --rounds N           of each measurement (default 9)\n"
			    "  --device N           CUDA ordinal (default 0)\n";

static void parse(struct bench *bench, int *device, int argc, char **argv)
{
	static const struct option LONG[] = {
		{"rounds", required_argument, NULL, 'r'},
		{"device", required_argument, NULL, 'd'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	int letter;

	while ((letter = option_next(argc, argv, LONG, USAGE)) != -1) {
		if (letter == 'r')
			bench->rounds = (unsigned)option_count("--rounds", optarg, 1, MOST_ROUNDS);
		else
			*device = (int)option_count("--device", optarg, 0, 1024);
	}
}

static void open_bench(struct bench *bench, int device)
{
	gpu_open(&bench->gpu, device, 1);
	cuda_check(cuModuleGetFunction(&bench->empty, gpu_module(EMPTY_PTX), "empty"), "cuModuleGetFunction");
	cuda_check(cuEventCreate(&bench->from, CU_EVENT_DEFAULT), "cuEventCreate");
	cuda_check(cuEventCreate(&bench->to, CU_EVENT_DEFAULT), "cuEventCreate");
}

static void launch_empty(const struct bench *bench)
{
	cuda_check(cuLaunchKernel(bench->empty, ONE.blocks, 1, 1, ONE.threads, 1, 1, 0, bench->gpu.stream, NULL, NULL),
		   "cuLaunchKernel");
}

static void record(const struct bench *bench, CUevent event)
{
	cuda_check(cuEventRecord(event, bench->gpu.stream), "cuEventRecord");
}

static double elapsed_ns(const struct bench *bench)
{
	float ms;

	gpu_wait(&bench->gpu);
	cuda_check(cuEventElapsedTime(&ms, bench->from, bench->to), "cuEventElapsedTime");
	return (double)ms * 1e6;
}

static int ascending(const void *left, const void *right)
{
	double a = *(const double *)left, b = *(const double *)right;

	return (a > b) - (a < b);
}

/* Of the rounds: one that something disturbed does not count. */
static double median_of(const struct bench *bench, double (*measure)(const struct bench *))
{
	double values[MOST_ROUNDS];

	measure(bench);
	for (unsigned round = 0; round < bench->rounds; round++)
		values[round] = measure(bench);
	qsort(values, bench->rounds, sizeof(*values), ascending);
	return values[bench->rounds / 2];
}

/* What the calling thread spends on one, while the stream has work and room. */
static double launch_ns(const struct bench *bench)
{
	uint64_t started_ns, ended_ns;

	gpu_spin(&bench->gpu, 0, ONE, HOLD_NS);
	started_ns = clock_now_ns();
	for (int i = 0; i < LAUNCHES; i++)
		launch_empty(bench);
	ended_ns = clock_now_ns();
	gpu_wait(&bench->gpu);
	return (double)(ended_ns - started_ns) / LAUNCHES;
}

/* From one to the next on the GPU, where all of them are queued. */
static double smallest_kernel_ns(const struct bench *bench)
{
	gpu_spin(&bench->gpu, 0, ONE, HOLD_NS);
	record(bench, bench->from);
	for (int i = 0; i < LAUNCHES; i++)
		launch_empty(bench);
	record(bench, bench->to);
	return elapsed_ns(bench) / LAUNCHES;
}

static double launch_and_wait_ns(const struct bench *bench)
{
	uint64_t started_ns = clock_now_ns();

	for (int i = 0; i < LAUNCHES / 10; i++) {
		launch_empty(bench);
		gpu_wait(&bench->gpu);
	}
	return (double)(clock_now_ns() - started_ns) / (LAUNCHES / 10);
}

static double spun_ns(const struct bench *bench, struct shape shape, uint64_t ns)
{
	/* So long that the host has launched all before the one that counts begins. */
	gpu_spin(&bench->gpu, 0, shape, ns < LEAST_COVER_NS ? LEAST_COVER_NS : ns);
	record(bench, bench->from);
	gpu_spin(&bench->gpu, 0, shape, ns);
	record(bench, bench->to);
	return elapsed_ns(bench);
}

static double ragged_ns(const struct bench *bench)
{
	return spun_ns(bench, RAGGED, RAGGED_NS);
}

/* How many launches a stream takes in before one waits; 0: more than were tried. */
static unsigned queue_depth(const struct bench *bench)
{
	unsigned launched = 0;
	bool blocked = false;

	gpu_spin(&bench->gpu, 0, ONE, LONG_HOLD_NS);
	while (!blocked && launched < MOST_LAUNCHES) {
		uint64_t started_ns = clock_now_ns();

		launch_empty(bench);
		launched++;
		blocked = clock_now_ns() - started_ns > BLOCKED_NS;
	}
	gpu_wait(&bench->gpu);
	return blocked ? launched : 0;
}

/* The fastest of the rounds, each direction by itself; the first copies do not count, as they touch all pages. */
static void write_copies(const struct bench *bench)
{
	CUdeviceptr device;
	void *host;
	uint64_t in_ns = UINT64_MAX, out_ns = UINT64_MAX;

	cuda_check(cuMemAlloc(&device, COPY_BYTES), "cuMemAlloc");
	cuda_check(cuMemAllocHost(&host, COPY_BYTES), "cuMemAllocHost");
	for (unsigned round = 0; round <= bench->rounds; round++) {
		uint64_t started_ns = clock_now_ns(), ns;

		cuda_check(cuMemcpyHtoDAsync(device, host, COPY_BYTES, bench->gpu.stream), "cuMemcpyHtoDAsync");
		gpu_wait(&bench->gpu);
		ns = clock_now_ns() - started_ns;
		in_ns = round && ns < in_ns ? ns : in_ns;
		started_ns = clock_now_ns();
		cuda_check(cuMemcpyDtoHAsync(host, device, COPY_BYTES, bench->gpu.stream), "cuMemcpyDtoHAsync");
		gpu_wait(&bench->gpu);
		ns = clock_now_ns() - started_ns;
		out_ns = round && ns < out_ns ? ns : out_ns;
	}
	cuda_check(cuMemFreeHost(host), "cuMemFreeHost");
	cuda_check(cuMemFree(device), "cuMemFree");
	printf(" \"to_device_bytes_per_second\": %.0f,\n", (double)COPY_BYTES * 1e9 / (double)in_ns);
	printf(" \"to_host_bytes_per_second\": %.0f,\n", (double)COPY_BYTES * 1e9 / (double)out_ns);
}

static void write_lengths(struct bench *bench)
{
	gpu_calibrate(&bench->gpu, WAVE);
	printf(" \"iterations_per_us\": %lu,\n", bench->gpu.iterations_per_us);
	for (int i = 0; i < LENGTHS; i++) {
		double fastest_ns = spun_ns(bench, WAVE, LENGTH_NS[i]);

		for (unsigned round = 1; round < bench->rounds && round < 5; round++) {
			double ns = spun_ns(bench, WAVE, LENGTH_NS[i]);

			fastest_ns = ns < fastest_ns ? ns : fastest_ns;
		}
		printf(" \"spin_%lu_ns\": %.0f,\n", LENGTH_NS[i], fastest_ns);
	}
	gpu_calibrate(&bench->gpu, RAGGED);
	printf(" \"ragged_ns\": %.0f}\n", median_of(bench, ragged_ns));
}

int main(int argc, char **argv)
{
	struct bench bench = {.rounds = 9};
	int device = 0;

	parse(&bench, &device, argc, argv);
	open_bench(&bench, device);
	gpu_calibrate(&bench.gpu, ONE);
	printf("{\"program\": \"constants\", \"sms\": %u,\n", bench.gpu.sm_count);
	printf(" \"launch_ns\": %.0f,\n", median_of(&bench, launch_ns));
	printf(" \"smallest_kernel_ns\": %.0f,\n", median_of(&bench, smallest_kernel_ns));
	printf(" \"launch_and_wait_ns\": %.0f,\n", median_of(&bench, launch_and_wait_ns));
	printf(" \"queue_depth\": %u,\n", queue_depth(&bench));
	write_copies(&bench);
	write_lengths(&bench);
	return ferror(stdout) ? 1 : 0;
}
