/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * online: a service with open-loop arrivals that measures its own latency. Requests arrive when they arrive, whether or
 * not the last one is done, because that is how a slow GPU hurts.
 */
#include <errno.h>
#include <getopt.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "arrivals.h"
#include "clock.h"
#include "http.h"
#include "options.h"
#include "service.h"
#include "stopping.h"

struct options {
	struct request request;
	double rate_per_second, period_ms, seconds, drain_seconds;
	uint64_t seed, requests, iterations_per_us;
	const char *trace, *log, *json, *address;
	int device;
	unsigned port; /* used when `http` */
	bool http, start_now;
};

struct outcome {
	uint64_t elapsed_ns;
	uint64_t unserved; /* had arrived, and were given up */
};

static const char USAGE[] =
	"usage: online [options]\n"
	"  --rate R             Poisson arrivals per second (default 125; 0: none, HTTP only)\n"
	"  --period-ms P        instead, one arrival every P ms; the seed gives the first one's time\n"
	"  --seed N             of the arrivals and the kernels (default 1)\n"
	"  --trace FILE         arrivals from a file instead: seconds since the start, one per line\n"
	"  --requests N         end after N requests\n"
	"  --seconds S          no arrivals after S seconds (default 10)\n"
	"  --drain-seconds S    then serve what has arrived for at most S more (default 30)\n"
	"  --kernels N          launches per request (default 40)\n"
	"  --kernel-us U        length of each (default 100)\n" KERNELS_USAGE
	"  --copy-bytes N       copied back per request (default 0)\n"
	"  --graph              launch a request's kernels as one CUDA graph\n"
	"  --device N           CUDA ordinal (default 0)\n"
	"  --iterations-per-us N     of the spin kernel, instead of measuring it at the start\n"
	"  --port P             serve /infer, /metrics and /healthz over HTTP (0: any free port)\n"
	"  --address A          to listen on (default 127.0.0.1)\n"
	"  --log FILE           a line per request: arrival_s latency_s service_s\n"
	"  --json FILE          the summary (default: standard output)\n"
	"  --start-now          do not wait for a byte on standard input after printing `ready`\n";

static void parse_file(struct options *options, int letter)
{
	if (letter == 'T')
		options->trace = optarg;
	if (letter == 'l')
		options->log = optarg;
	if (letter == 'j')
		options->json = optarg;
	if (letter == 'a')
		options->address = optarg;
}

static void parse_load(struct options *options, int letter)
{
	switch (letter) {
	case 'r':
		options->rate_per_second = option_number("--rate", optarg, 0, 1e6);
		break;
	case 'P':
		options->period_ms = option_number("--period-ms", optarg, 0.01, 1e6);
		break;
	case 's':
		options->seed = option_count("--seed", optarg, 0, UINT64_MAX);
		break;
	case 'n':
		options->requests = option_count("--requests", optarg, 1, UINT64_MAX);
		break;
	case 'S':
		options->seconds = option_number("--seconds", optarg, 0, 1e9);
		break;
	case 'D':
		options->drain_seconds = option_number("--drain-seconds", optarg, 0, 1e9);
		break;
	case 'd':
		options->device = (int)option_count("--device", optarg, 0, 1024);
		break;
	case 'p':
		options->port = (unsigned)option_count("--port", optarg, 0, 65535);
		options->http = true;
		break;
	case 'N':
		options->start_now = true;
		break;
	default:
		parse_file(options, letter);
	}
}

static void parse_option(struct options *options, int letter)
{
	struct request *request = &options->request;

	switch (letter) {
	case 'k':
		request->launches = (unsigned)option_count("--kernels", optarg, 1, 1000000);
		break;
	case 'c':
		request->copy_bytes = option_bytes("--copy-bytes", optarg);
		break;
	case 'g':
		request->graph = true;
		break;
	case 'i':
		options->iterations_per_us = option_count("--iterations-per-us", optarg, 1, 1000000);
		break;
	default:
		if (!kernels_option(&request->kernels, letter, optarg))
			parse_load(options, letter);
	}
}

static void parse(struct options *options, int argc, char **argv)
{
	static const struct option LONG[] = {
		{"rate", required_argument, NULL, 'r'},
		{"period-ms", required_argument, NULL, 'P'},
		{"seed", required_argument, NULL, 's'},
		{"trace", required_argument, NULL, 'T'},
		{"requests", required_argument, NULL, 'n'},
		{"seconds", required_argument, NULL, 'S'},
		{"drain-seconds", required_argument, NULL, 'D'},
		{"kernels", required_argument, NULL, 'k'},
		KERNELS_LONG_OPTIONS,
		{"copy-bytes", required_argument, NULL, 'c'},
		{"graph", no_argument, NULL, 'g'},
		{"device", required_argument, NULL, 'd'},
		{"iterations-per-us", required_argument, NULL, 'i'},
		{"port", required_argument, NULL, 'p'},
		{"address", required_argument, NULL, 'a'},
		{"log", required_argument, NULL, 'l'},
		{"json", required_argument, NULL, 'j'},
		{"start-now", no_argument, NULL, 'N'},
		{"help", no_argument, NULL, 'h'},
		{0},
	};
	int letter;

	while ((letter = option_next(argc, argv, LONG, USAGE)) != -1)
		parse_option(options, letter);
	if (optind < argc) {
		fprintf(stderr, "what is \"%s\"? online takes options only\n%s", argv[optind], USAGE);
		exit(2);
	}
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

/* A parent that went away without saying "go" will not read the figures either. */
static void wait_for_the_start(void)
{
	char byte;
	ssize_t got = read(STDIN_FILENO, &byte, 1);

	if (got == 1 || (got < 0 && errno == EINTR))
		return;
	fprintf(stderr, "standard input ended before anybody said when to start; give --start-now to start at once\n");
	exit(1);
}

/* False when the program was asked to end before. */
static bool sleep_until(uint64_t until_ns)
{
	while (!stop_asked && clock_now_ns() < until_ns)
		clock_sleep_until_ns(until_ns);
	return !stop_asked;
}

static uint64_t count_rest(struct arrivals *arrivals, double before_s)
{
	double arrival_s;
	uint64_t count = 1; /* the one that the caller holds */

	while (arrivals_next(arrivals, &arrival_s) && arrival_s < before_s)
		count++;
	return count;
}

static struct outcome serve(struct service *service, const struct options *options, struct arrivals *arrivals)
{
	struct outcome outcome = {0};
	double arrival_s = 0, give_up_s = options->seconds + options->drain_seconds;
	uint64_t begun = 0;
	bool more = true;

	while ((!options->requests || begun < options->requests) && (more = arrivals_next(arrivals, &arrival_s)) &&
	       arrival_s < options->seconds) {
		uint64_t arrival_ns = service->started_ns + (uint64_t)(arrival_s * 1e9);

		if (!sleep_until(arrival_ns))
			break;
		if ((double)(clock_now_ns() - service->started_ns) / 1e9 > give_up_s) {
			outcome.unserved = count_rest(arrivals, options->seconds);
			break;
		}
		service_do(service, arrival_ns);
		begun++;
	}
	if (options->http && (!more || arrival_s >= options->seconds))
		sleep_until(service->started_ns + (uint64_t)(options->seconds * 1e9));
	outcome.elapsed_ns = clock_now_ns() - service->started_ns;
	return outcome;
}

static void write_summary(struct service *service, const struct outcome *outcome, FILE *file)
{
	double elapsed_s = (double)outcome->elapsed_ns / 1e9;

	pthread_mutex_lock(&service->lock); /* HTTP requests may still come in */
	fprintf(file, "{\"program\": \"online\", \"requests\": %zu, \"unserved\": %lu, \"elapsed_seconds\": %.9f,\n",
		service->latency.count, outcome->unserved, elapsed_s);
	fprintf(file, " \"busy_ratio\": %.6f, \"started_monotonic_ns\": %lu, \"iterations_per_us\": %lu,\n",
		service->busy.sum_s / elapsed_s, service->started_ns, service->gpu.iterations_per_us);
	fprintf(file, " \"latency_seconds\": ");
	latencies_write_json(&service->latency, file);
	fprintf(file, ",\n \"service_seconds\": ");
	latencies_write_json(&service->busy, file);
	fprintf(file, "}\n");
	pthread_mutex_unlock(&service->lock);
	fflush(file);
}

int main(int argc, char **argv)
{
	struct options options = {
		.request = {.launches = 40, .kernels = KERNELS_DEFAULT(100)},
		.rate_per_second = 125,
		.seconds = 10,
		.drain_seconds = 30,
		.seed = 1,
		.address = "127.0.0.1",
	};
	static struct service service; /* the HTTP threads use it until the program ends */
	struct arrivals arrivals;
	struct outcome outcome;
	FILE *summary = stdout;

	parse(&options, argc, argv);
	stop_on_signals();
	prctl(PR_SET_TIMERSLACK, 1); /* arrivals are not to be late by the default 50 µs */
	if (options.trace)
		arrivals_trace(&arrivals, options.trace);
	else if (options.period_ms > 0)
		arrivals_periodic(&arrivals, options.period_ms / 1e3, options.seed);
	else
		arrivals_poisson(&arrivals, options.rate_per_second, options.seed);
	if (options.json)
		summary = open_for_writing(options.json);
	kernels_start(&options.request.kernels, options.seed);
	service_open(&service, &options.request, options.device, options.iterations_per_us);
	service.log = options.log ? open_for_writing(options.log) : NULL;
	service.started_ns = clock_now_ns();
	if (options.http)
		printf("listening %s:%u\n", options.address, http_serve(&service, options.address, options.port));
	printf("ready\n");
	fflush(stdout);
	if (!options.start_now)
		wait_for_the_start();
	service.started_ns = service.request.kernels.started_ns = clock_now_ns();
	outcome = serve(&service, &options, &arrivals);
	write_summary(&service, &outcome, summary);
	return ferror(summary) ? 1 : 0;
}
