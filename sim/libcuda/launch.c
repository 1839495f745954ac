/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK_NS 1000
#define MAX_GRID_X 0x7fffffffu
#define MAX_GRID_YZ 65535u
#define MAX_BLOCK_Z 64u

/* ---- kernels ---- */

static const void *first_parameter(void **params, void **extra)
{
	if (params)
		return params[0];
	for (; extra && extra[0] != CU_LAUNCH_PARAM_END; extra += 2)
		if (extra[0] == CU_LAUNCH_PARAM_BUFFER_POINTER)
			return extra[1];
	return NULL;
}

static uint64_t untimed_block_ns;

static void read_block_ns(void)
{
	const char *wanted = getenv("GPUSIM_BLOCK_NS");

	untimed_block_ns = wanted ? strtoull(wanted, NULL, 10) : 0;
	if (!untimed_block_ns)
		untimed_block_ns = BLOCK_NS;
}

/* How long a block lasts of a kernel that does not say it: what $GPUSIM_BLOCK_NS says when the first one is launched. */
static uint64_t block_ns(void)
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	pthread_once(&once, read_block_ns);
	return untimed_block_ns;
}

CUresult kernel_of(const CUDA_KERNEL_NODE_PARAMS *p, struct kernel *kernel)
{
	CUfunction function = p->func ? p->func : (CUfunction)p->kern;
	CUresult result = function_check(function);
	const void *duration;

	if (result != CUDA_SUCCESS)
		return result;
	if (!p->gridDimX || !p->gridDimY || !p->gridDimZ || p->gridDimX > MAX_GRID_X || p->gridDimY > MAX_GRID_YZ ||
	    p->gridDimZ > MAX_GRID_YZ || !p->blockDimX || !p->blockDimY || !p->blockDimZ || p->blockDimX > MAX_BLOCK ||
	    p->blockDimY > MAX_BLOCK || p->blockDimZ > MAX_BLOCK_Z)
		return CUDA_ERROR_INVALID_VALUE;
	kernel->blocks = (uint64_t)p->gridDimX * p->gridDimY * p->gridDimZ;
	kernel->threads = (uint64_t)p->blockDimX * p->blockDimY * p->blockDimZ;
	kernel->block_ns = block_ns();
	if (kernel->threads > function->max_threads || p->sharedMemBytes > dynamic_room(function))
		return CUDA_ERROR_INVALID_VALUE;
	if (!function->timed)
		return CUDA_SUCCESS;
	duration = first_parameter(p->kernelParams, p->extra);
	if (!duration)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(&kernel->block_ns, duration, sizeof(kernel->block_ns));
	if (!kernel->block_ns)
		kernel->block_ns = 1;
	return CUDA_SUCCESS;
}

/* What a launch costs the calling thread: the driver writes its commands before the GPU can begin. */
static void spend_launch(void)
{
	uint64_t until_ns = clock_ns() + connection.welcome.launch_ns;

	while (clock_ns() < until_ns)
		;
}

CUresult kernel_submit(struct CUstream_st *stream, const struct kernel *k, bool first)
{
	if (first)
		spend_launch();
	return ring_operation(stream, CMD_KERNEL, (uint64_t[4]){k->blocks, k->threads, k->block_ns, first}, NULL);
}

CUresult kernel_launch(CUstream handle, const CUDA_KERNEL_NODE_PARAMS *params)
{
	struct CUstream_st *stream;
	struct kernel kernel;
	CUresult result = stream_resolve(handle, &stream);

	if (result == CUDA_SUCCESS)
		result = kernel_of(params, &kernel);
	if (result != CUDA_SUCCESS)
		return result;
	return stream->capture ? capture_kernel(stream, &kernel) : kernel_submit(stream, &kernel, true);
}

static CUresult launch_config(const CUlaunchConfig *c, CUfunction f, void **params, void **extra)
{
	CUDA_KERNEL_NODE_PARAMS node;

	if (!c)
		return CUDA_ERROR_INVALID_VALUE;
	node = (CUDA_KERNEL_NODE_PARAMS){f,
					 c->gridDimX,
					 c->gridDimY,
					 c->gridDimZ,
					 c->blockDimX,
					 c->blockDimY,
					 c->blockDimZ,
					 c->sharedMemBytes,
					 params,
					 extra,
					 NULL,
					 NULL};
	return kernel_launch(c->hStream, &node);
}

#define NODE(params, extra)                                                                                            \
	(&(CUDA_KERNEL_NODE_PARAMS){f, gx, gy, gz, bx, by, bz, shared_bytes, params, extra, NULL, NULL})

API2(cuLaunchKernel, cuLaunchKernel_ptsz,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
      CUstream stream, void **params, void **extra),
     kernel_launch(stream, NODE(params, extra)))
API2(cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz,
     (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared_bytes,
      CUstream stream, void **params),
     kernel_launch(stream, NODE(params, NULL)))
API2(cuLaunchKernelEx, cuLaunchKernelEx_ptsz, (const CUlaunchConfig *config, CUfunction f, void **params, void **extra),
     launch_config(config, f, params, extra))

/* ---- one kernel on several devices ---- */

static uint32_t device_of(CUstream stream)
{
	return stream->context->device;
}

/* As the driver has it: streams of their own, each on a device of its own, all the same shape. */
static bool valid_multi(const CUDA_LAUNCH_PARAMS *list, unsigned count)
{
	for (unsigned i = 0; i < count; i++) {
		const CUDA_LAUNCH_PARAMS *p = &list[i];

		if (!p->hStream || p->hStream == CU_STREAM_LEGACY || p->hStream == CU_STREAM_PER_THREAD ||
		    p->hStream->magic != MAGIC_STREAM || p->gridDimX != list->gridDimX ||
		    p->gridDimY != list->gridDimY || p->gridDimZ != list->gridDimZ || p->blockDimX != list->blockDimX ||
		    p->blockDimY != list->blockDimY || p->blockDimZ != list->blockDimZ ||
		    p->sharedMemBytes != list->sharedMemBytes)
			return false;
		for (unsigned j = 0; j < i; j++)
			if (device_of(list[j].hStream) == device_of(p->hStream))
				return false;
	}
	return true;
}

API cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned count, unsigned flags)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!list || !count || flags & ~3u || !valid_multi(list, count))
		return CUDA_ERROR_INVALID_VALUE;
	result = call_begin();
	if (result != CUDA_SUCCESS)
		return result;
	for (unsigned i = 0; i < count && result == CUDA_SUCCESS; i++) {
		const CUDA_LAUNCH_PARAMS *p = &list[i];

		result = kernel_launch(p->hStream, &(CUDA_KERNEL_NODE_PARAMS){p->function, p->gridDimX, p->gridDimY,
									      p->gridDimZ, p->blockDimX, p->blockDimY,
									      p->blockDimZ, p->sharedMemBytes,
									      p->kernelParams, NULL, NULL, NULL});
	}
	call_end();
	return result;
}

/* ---- host functions: one thread calls them in the order of submission ---- */

struct host_call {
	struct point after;
	CUhostFn function;
	void *argument;
	struct host_call *next;
};

static pthread_mutex_t host_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t host_changed = PTHREAD_COND_INITIALIZER;
static struct host_call *host_first, **host_end = &host_first;
static bool host_thread_runs;
static uint64_t host_asked[MAX_STREAMS], host_done[MAX_STREAMS];

/* A lock from outside waits for them too. */
static void host_calls_add(int change)
{
	if (ready() == CUDA_SUCCESS)
		atomic_fetch_add(&connection.shared->host_calls, (uint32_t)change);
}

static void *call_host_functions(void *unused)
{
	pthread_mutex_lock(&host_lock);
	for (;;) {
		struct host_call *call = host_first;
		CUresult result;

		if (!call) {
			pthread_cond_wait(&host_changed, &host_lock);
			continue;
		}
		host_first = call->next;
		if (!host_first)
			host_end = &host_first;
		pthread_mutex_unlock(&host_lock);
		result = point_wait(call->after);
		if (result == CUDA_SUCCESS) /* as the real driver: not called after an error of the context */
			call->function(call->argument);
		host_calls_add(-1);
		pthread_mutex_lock(&host_lock);
		host_done[call->after.stream]++;
		pthread_cond_broadcast(&host_changed);
		free(call);
	}
	return unused;
}

/* With host_lock. The program's signals are not for this thread. */
static bool host_thread_start(void)
{
	pthread_t thread;
	sigset_t all, before;

	if (host_thread_runs)
		return true;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	host_thread_runs = pthread_create(&thread, NULL, call_host_functions, NULL) == 0;
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (host_thread_runs)
		pthread_detach(thread);
	return host_thread_runs;
}

bool host_pending(uint32_t stream)
{
	bool pending;

	pthread_mutex_lock(&host_lock);
	pending = host_done[stream] < host_asked[stream];
	pthread_mutex_unlock(&host_lock);
	return pending;
}

CUresult host_wait(uint32_t stream)
{
	uint64_t wanted;

	pthread_mutex_lock(&host_lock);
	wanted = host_asked[stream];
	while (host_done[stream] < wanted)
		pthread_cond_wait(&host_changed, &host_lock);
	pthread_mutex_unlock(&host_lock);
	return CUDA_SUCCESS;
}

static CUresult launch_host_func(CUstream handle, CUhostFn function, void *argument)
{
	struct CUstream_st *stream;
	struct host_call *call;
	CUresult result = stream_for_work(handle, &stream);

	if (result != CUDA_SUCCESS)
		return result;
	if (!function)
		return CUDA_ERROR_INVALID_VALUE;
	call = malloc(sizeof(*call));
	if (!call)
		return CUDA_ERROR_OUT_OF_MEMORY;
	result = call_begin();
	if (result != CUDA_SUCCESS) {
		free(call);
		return result;
	}
	*call = (struct host_call){ring_last(stream), function, argument, NULL};
	pthread_mutex_lock(&host_lock);
	if (host_thread_start()) {
		host_calls_add(1);
		*host_end = call;
		host_end = &call->next;
		host_asked[call->after.stream]++;
		pthread_cond_broadcast(&host_changed);
	} else {
		free(call);
		result = CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_unlock(&host_lock);
	call_end();
	return result;
}

API2(cuLaunchHostFunc, cuLaunchHostFunc_ptsz, (CUstream handle, CUhostFn function, void *argument),
     launch_host_func(handle, function, argument))
