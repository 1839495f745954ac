/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "service.h"

#include "clock.h"

static void launch_kernels(struct service *service)
{
	for (unsigned launch = 0; launch < service->request.launches; launch++) {
		struct kernel kernel = kernels_next(&service->request.kernels);

		gpu_spin(&service->gpu, kernel.function, kernel.shape, kernel.ns);
	}
}

static void record_graph(struct service *service)
{
	gpu_begin_graph(&service->gpu);
	launch_kernels(service);
	service->graph = gpu_end_graph(&service->gpu);
}

void service_open(struct service *service, const struct request *request, int device, uint64_t iterations_per_us)
{
	*service = (struct service){
		.request = *request,
		.lock = PTHREAD_MUTEX_INITIALIZER,
	};
	service->last = &service->first;
	gpu_open(&service->gpu, device, request->kernels.functions);
	if (request->copy_bytes) {
		cuda_check(cuMemAlloc(&service->answer_on_device, request->copy_bytes), "cuMemAlloc");
		cuda_check(cuMemAllocHost(&service->answer, request->copy_bytes), "cuMemAllocHost");
	}
	if (iterations_per_us)
		service->gpu.iterations_per_us = iterations_per_us;
	else
		gpu_calibrate(&service->gpu, request->kernels.shape);
	if (request->graph)
		record_graph(service);
}

/* Who waits for its turn, on its own stack: however many they are, the end of a request wakes one. */
struct waiter {
	struct waiter *next;
	pthread_cond_t turn;
	bool is_next;
};

/* A plain mutex lets the last owner in again before those who wait; a request queue must not. */
static void wait_for_turn(struct service *service)
{
	struct waiter own = {.turn = PTHREAD_COND_INITIALIZER};

	pthread_mutex_lock(&service->lock);
	service->waiting++;
	if (service->serving) {
		*service->last = &own;
		service->last = &own.next;
		while (!own.is_next)
			pthread_cond_wait(&own.turn, &service->lock);
	}
	service->serving = true;
	pthread_mutex_unlock(&service->lock);
	pthread_cond_destroy(&own.turn);
}

/* Called with the lock. The service goes from hand to hand: no request that comes now gets in between. */
static void pass_on(struct service *service)
{
	struct waiter *next = service->first;

	service->waiting--;
	service->serving = next != NULL;
	if (!next)
		return;
	service->first = next->next;
	if (!service->first)
		service->last = &service->first;
	next->is_next = true;
	pthread_cond_signal(&next->turn);
}

static void run(struct service *service)
{
	const struct request *request = &service->request;

	if (service->graph)
		cuda_check(cuGraphLaunch(service->graph, service->gpu.stream), "cuGraphLaunch");
	else
		launch_kernels(service);
	if (request->copy_bytes)
		cuda_check(cuMemcpyDtoHAsync(service->answer, service->answer_on_device, request->copy_bytes,
					     service->gpu.stream),
			   "cuMemcpyDtoHAsync");
	gpu_wait(&service->gpu);
}

static void record(struct service *service, uint64_t arrival_ns, uint64_t begun_ns, uint64_t ended_ns)
{
	double latency_s = (double)(ended_ns - arrival_ns) / 1e9;
	double busy_s = (double)(ended_ns - begun_ns) / 1e9;

	latencies_add(&service->latency, latency_s);
	latencies_add(&service->busy, busy_s);
	if (service->log) {
		fprintf(service->log, "%.9f %.9f %.9f\n", (double)(int64_t)(arrival_ns - service->started_ns) / 1e9,
			latency_s, busy_s);
		fflush(service->log); /* a reader of the log sees each request as it ends */
	}
}

uint64_t service_do(struct service *service, uint64_t arrival_ns)
{
	uint64_t begun_ns, ended_ns;

	wait_for_turn(service);
	begun_ns = clock_now_ns();
	run(service);
	ended_ns = clock_now_ns();

	pthread_mutex_lock(&service->lock);
	record(service, arrival_ns, begun_ns, ended_ns);
	pass_on(service);
	pthread_mutex_unlock(&service->lock);
	return ended_ns - arrival_ns;
}

void service_write_metrics(struct service *service, FILE *file)
{
	pthread_mutex_lock(&service->lock);
	latencies_write_histogram(&service->latency, "online_request_duration_seconds",
				  "Time from a request's arrival to its answer.", file);
	fprintf(file,
		"# HELP online_busy_seconds_total Time in which a request was being served.\n"
		"# TYPE online_busy_seconds_total counter\n"
		"online_busy_seconds_total %.9f\n"
		"# HELP online_requests_waiting Requests that have arrived at the service and are not answered.\n"
		"# TYPE online_requests_waiting gauge\n"
		"online_requests_waiting %lu\n",
		service->busy.sum_s, service->waiting);
	pthread_mutex_unlock(&service->lock);
}
