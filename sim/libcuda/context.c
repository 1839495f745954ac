/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <stdlib.h>

#define STACK_DEPTH 64

/* Holds for opening and closing only, so that the last context of a device is closed before another opens. */
static pthread_mutex_t contexts_lock = PTHREAD_MUTEX_INITIALIZER;
static struct CUctx_st primaries[MAX_DEVICES]; /* never freed: handles of a released one stay recognisable */
static unsigned primary_users[MAX_DEVICES], open_contexts[MAX_DEVICES];

static __thread struct CUctx_st *stack[STACK_DEPTH];
static __thread unsigned depth;

/* ---- opening and closing, with contexts_lock ---- */

static void device_leave(struct CUctx_st *context)
{
	if (--open_contexts[context->ordinal] == 0)
		ring_request(CMD_CONTEXT_END, context->device, 0, NULL);
}

static CUresult context_open(struct CUctx_st *context, int ordinal)
{
	CUresult result = CUDA_SUCCESS;

	*context = (struct CUctx_st){.magic = MAGIC_CONTEXT, .ordinal = ordinal, .device = connection.visible[ordinal]};
	if (open_contexts[ordinal] == 0)
		result = ring_request(CMD_CONTEXT_NEW, context->device, 0, NULL);
	if (result != CUDA_SUCCESS)
		return result;
	open_contexts[ordinal]++;
	result = ring_stream_new(context, CU_STREAM_DEFAULT, 0, &context->null);
	if (result != CUDA_SUCCESS)
		device_leave(context);
	else
		atomic_store(&context->alive, true);
	return result;
}

static void context_close(struct CUctx_st *context)
{
	atomic_store(&context->alive, false);
	captures_end(context);
	ring_streams_end(context);
	memory_forget(context);
	host_memory_forget(context);
	device_leave(context);
}

/* ---- primary contexts ---- */

static CUresult primary_retain(CUcontext *context, CUdevice device)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	if (!context)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&contexts_lock);
	if (!atomic_load(&primaries[device].alive))
		result = context_open(&primaries[device], device);
	if (result == CUDA_SUCCESS) {
		primary_users[device]++;
		*context = &primaries[device];
	}
	pthread_mutex_unlock(&contexts_lock);
	return result;
}

static CUresult primary_drop(CUdevice device, bool all)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&contexts_lock);
	if (!primary_users[device])
		result = all ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
	else if (all)
		primary_users[device] = 0;
	else
		primary_users[device]--;
	if (!primary_users[device] && atomic_load(&primaries[device].alive))
		context_close(&primaries[device]);
	pthread_mutex_unlock(&contexts_lock);
	return result;
}

API cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
	return primary_retain(context, device);
}

API cuDevicePrimaryCtxRelease(CUdevice device)
{
	return primary_drop(device, false);
}

API cuDevicePrimaryCtxReset(CUdevice device)
{
	return primary_drop(device, true);
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	if (!flags || !active)
		return CUDA_ERROR_INVALID_VALUE;
	*flags = 0;
	*active = atomic_load(&primaries[device].alive);
	return CUDA_SUCCESS;
}

/* ---- the stack of a thread ---- */

static bool valid(const struct CUctx_st *context)
{
	return context && context->magic == MAGIC_CONTEXT && atomic_load(&context->alive);
}

CUresult context_current(struct CUctx_st **context)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!depth || !valid(stack[depth - 1]))
		return CUDA_ERROR_INVALID_CONTEXT;
	*context = stack[depth - 1];
	return CUDA_SUCCESS;
}

static CUresult push(struct CUctx_st *context)
{
	if (!valid(context))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth == STACK_DEPTH)
		return CUDA_ERROR_OUT_OF_MEMORY;
	stack[depth++] = context;
	return CUDA_SUCCESS;
}

API cuCtxSetCurrent(CUcontext context)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (context && !valid(context))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (depth)
		depth--;
	return context ? push(context) : CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext *context)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!context)
		return CUDA_ERROR_INVALID_VALUE;
	*context = depth ? stack[depth - 1] : NULL;
	return CUDA_SUCCESS;
}

API cuCtxPushCurrent(CUcontext context)
{
	CUresult result = ready();

	return result == CUDA_SUCCESS ? push(context) : result;
}

static CUresult pop(CUcontext *context)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!depth)
		return CUDA_ERROR_INVALID_CONTEXT;
	depth--;
	if (context)
		*context = stack[depth];
	return CUDA_SUCCESS;
}

API cuCtxPopCurrent(CUcontext *context)
{
	return pop(context);
}

/* ---- contexts that the program makes ---- */

static CUresult create(CUcontext *out, CUdevice device)
{
	CUresult result = ready_ordinal(device);
	struct CUctx_st *context;

	if (result != CUDA_SUCCESS)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	context = calloc(1, sizeof(*context));
	if (!context)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&contexts_lock);
	result = context_open(context, device);
	pthread_mutex_unlock(&contexts_lock);
	if (result != CUDA_SUCCESS) {
		free(context);
		return result;
	}
	*out = context;
	return push(context);
}

/* Not freed: other threads may still have it on their stacks, and learn from it that it is gone. */
static CUresult destroy(struct CUctx_st *context)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	pthread_mutex_lock(&contexts_lock);
	if (!valid(context) || context->primary || (context >= primaries && context < primaries + MAX_DEVICES))
		result = CUDA_ERROR_INVALID_CONTEXT;
	else
		context_close(context);
	pthread_mutex_unlock(&contexts_lock);
	if (result == CUDA_SUCCESS && depth && stack[depth - 1] == context)
		depth--;
	return result;
}

API cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device)
{
	(void)flags;
	return create(context, device);
}

API cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *params, int count, unsigned flags, CUdevice device)
{
	(void)params, (void)flags;
	return count ? CUDA_ERROR_NOT_SUPPORTED : create(context, device); /* execution affinity */
}

/* Neither execution affinity nor CUDA in graphics is there. */
API cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *params, unsigned flags, CUdevice device)
{
	(void)flags;
	if (params && (params->numExecAffinityParams || params->cigParams))
		return CUDA_ERROR_NOT_SUPPORTED;
	return create(context, device);
}

API cuCtxDestroy(CUcontext context)
{
	return destroy(context);
}

/* Users beyond the one who made it; contexts_lock. */
static CUresult attach(CUcontext *out, unsigned flags)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!out || flags)
		return CUDA_ERROR_INVALID_VALUE;
	pthread_mutex_lock(&contexts_lock);
	context->attached++;
	pthread_mutex_unlock(&contexts_lock);
	*out = context;
	return CUDA_SUCCESS;
}

static CUresult detach(struct CUctx_st *context)
{
	CUresult result = ready();
	bool last;

	if (result != CUDA_SUCCESS)
		return result;
	if (!valid(context))
		return CUDA_ERROR_INVALID_CONTEXT;
	pthread_mutex_lock(&contexts_lock);
	last = !context->attached;
	if (!last)
		context->attached--;
	pthread_mutex_unlock(&contexts_lock);
	return last ? destroy(context) : CUDA_SUCCESS;
}

API cuCtxAttach(CUcontext *context, unsigned flags)
{
	return attach(context, flags);
}

API cuCtxDetach(CUcontext context)
{
	return detach(context);
}

API cuCtxGetDevice(CUdevice *device)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!device)
		return CUDA_ERROR_INVALID_VALUE;
	*device = context->ordinal;
	return CUDA_SUCCESS;
}

static CUresult synchronize(struct CUctx_st *context)
{
	struct point points[MAX_STREAMS];
	CUresult result = call_pass();
	size_t count = ring_points(context, points, MAX_STREAMS);

	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
		result = point_wait(points[i]);
		if (result == CUDA_SUCCESS)
			result = host_wait(points[i].stream);
	}
	return result;
}

API cuCtxSynchronize(void)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	return result == CUDA_SUCCESS ? synchronize(context) : result;
}

/* NULL: the current one. */
API cuCtxSynchronize_v2(CUcontext context)
{
	CUresult result = context ? ready() : context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	return valid(context) ? synchronize(context) : CUDA_ERROR_INVALID_CONTEXT;
}

API cuCtxGetApiVersion(CUcontext context, unsigned *version)
{
	CUresult result = context ? ready() : context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!valid(context))
		return CUDA_ERROR_INVALID_CONTEXT;
	if (!version)
		return CUDA_ERROR_INVALID_VALUE;
	*version = 3020; /* of contexts, unchanged since */
	return CUDA_SUCCESS;
}

/* Of the tools that would listen there are none. */
API cuProfilerStart(void)
{
	struct CUctx_st *context;

	return context_current(&context);
}

API cuProfilerStop(void)
{
	struct CUctx_st *context;

	return context_current(&context);
}

API cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (least)
		*least = 0;
	if (greatest)
		*greatest = -5;
	return CUDA_SUCCESS;
}

/* ---- green contexts: a part of the SMs, which is not modelled; the rest is the primary context's ---- */

struct CUgreenCtx_st {
	uint32_t magic;
	struct CUctx_st context;
};

API cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, CUdevResourceType type)
{
	CUresult result = ready_ordinal(device);

	if (result != CUDA_SUCCESS)
		return result;
	if (!resource)
		return CUDA_ERROR_INVALID_VALUE;
	if (type != CU_DEV_RESOURCE_TYPE_SM)
		return CUDA_ERROR_NOT_SUPPORTED;
	*resource = (CUdevResource){.type = type, .sm.smCount = facts_of(device)->sms};
	return CUDA_SUCCESS;
}

API cuDevResourceGenerateDesc(CUdevResourceDesc *description, CUdevResource *resources, unsigned count)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!description || !resources || !count)
		return CUDA_ERROR_INVALID_VALUE;
	*description = (CUdevResourceDesc)resources; /* opaque to callers */
	return CUDA_SUCCESS;
}

API cuGreenCtxCreate(CUgreenCtx *out, CUdevResourceDesc description, CUdevice device, unsigned flags)
{
	struct CUgreenCtx_st *green;
	CUcontext primary;
	CUresult result;

	if (!out || !description || flags & ~(unsigned)CU_GREEN_CTX_DEFAULT_STREAM)
		return CUDA_ERROR_INVALID_VALUE;
	result = primary_retain(&primary, device);
	if (result != CUDA_SUCCESS)
		return result;
	green = calloc(1, sizeof(*green));
	if (!green) {
		primary_drop(device, false);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	pthread_mutex_lock(&contexts_lock);
	result = context_open(&green->context, device);
	pthread_mutex_unlock(&contexts_lock);
	if (result != CUDA_SUCCESS) {
		free(green);
		primary_drop(device, false);
		return result;
	}
	green->magic = MAGIC_GREEN;
	green->context.primary = primary;
	*out = green;
	return CUDA_SUCCESS;
}

/* Not freed: as with other contexts. */
API cuGreenCtxDestroy(CUgreenCtx green)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!green || green->magic != MAGIC_GREEN)
		return CUDA_ERROR_INVALID_CONTEXT;
	green->magic = 0;
	pthread_mutex_lock(&contexts_lock);
	context_close(&green->context);
	pthread_mutex_unlock(&contexts_lock);
	return primary_drop(green->context.ordinal, false);
}

API cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!context || !green || green->magic != MAGIC_GREEN)
		return CUDA_ERROR_INVALID_VALUE;
	*context = &green->context;
	return CUDA_SUCCESS;
}

API cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned flags, int priority)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!stream || !green || green->magic != MAGIC_GREEN)
		return CUDA_ERROR_INVALID_VALUE;
	return ring_stream_new(&green->context, flags, priority < -5 ? -5 : priority > 0 ? 0 : priority, stream);
}

/* ---- the forms of before CUDA 4 (CUDA 11 for primary contexts) ---- */

#include "exact_names.h"

API cuCtxCreate(CUcontext *context, unsigned flags, CUdevice device)
{
	(void)flags;
	return create(context, device);
}

API cuCtxDestroy(CUcontext context)
{
	return destroy(context);
}

API cuCtxPushCurrent(CUcontext context)
{
	CUresult result = ready();

	return result == CUDA_SUCCESS ? push(context) : result;
}

API cuCtxPopCurrent(CUcontext *context)
{
	return pop(context);
}

API cuDevicePrimaryCtxRelease(CUdevice device)
{
	return primary_drop(device, false);
}

API cuDevicePrimaryCtxReset(CUdevice device)
{
	return primary_drop(device, true);
}
