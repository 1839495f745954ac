/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Launches of before CUDA 4: block shape and parameters are set on the function, then it is launched. */
#include "internal.h"

#include <stdlib.h>
#include <string.h>

/* NULL: no such function, or no memory. Kept until its module is unloaded. */
static struct launch_state *state_of(CUfunction f, CUresult *result)
{
	*result = ready();
	if (*result == CUDA_SUCCESS)
		*result = function_check(f);
	if (*result != CUDA_SUCCESS)
		return NULL;
	if (!f->state)
		f->state = calloc(1, sizeof(*f->state));
	if (!f->state)
		*result = CUDA_ERROR_OUT_OF_MEMORY;
	return f->state;
}

static CUresult set_parameter(CUfunction f, int offset, const void *value, size_t bytes)
{
	CUresult result;
	struct launch_state *state = state_of(f, &result);

	if (!state)
		return result;
	if (!value || offset < 0 || bytes > PARAMETER_ROOM || (size_t)offset > PARAMETER_ROOM - bytes)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(state->parameters + offset, value, bytes);
	return CUDA_SUCCESS;
}

static CUresult launch(CUfunction f, int width, int height, CUstream stream)
{
	CUresult result;
	struct launch_state *s = state_of(f, &result);

	if (!s)
		return result;
	if (width <= 0 || height <= 0 || !s->block[0])
		return CUDA_ERROR_INVALID_VALUE;
	void *extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, s->parameters, CU_LAUNCH_PARAM_BUFFER_SIZE,
			 &s->parameter_bytes, CU_LAUNCH_PARAM_END};

	return kernel_launch(stream, &(CUDA_KERNEL_NODE_PARAMS){f, (unsigned)width, (unsigned)height, 1, s->block[0],
								s->block[1], s->block[2], s->shared_bytes, NULL, extra,
								NULL, NULL});
}

API cuFuncSetBlockShape(CUfunction f, int x, int y, int z)
{
	CUresult result;
	struct launch_state *state = state_of(f, &result);

	if (!state)
		return result;
	if (x <= 0 || y <= 0 || z <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	state->block[0] = (unsigned)x;
	state->block[1] = (unsigned)y;
	state->block[2] = (unsigned)z;
	return CUDA_SUCCESS;
}

API cuFuncSetSharedSize(CUfunction f, unsigned bytes)
{
	CUresult result;
	struct launch_state *state = state_of(f, &result);

	if (state)
		state->shared_bytes = bytes;
	return result;
}

API cuParamSetSize(CUfunction f, unsigned bytes)
{
	CUresult result;
	struct launch_state *state = state_of(f, &result);

	if (!state)
		return result;
	if (bytes > PARAMETER_ROOM)
		return CUDA_ERROR_INVALID_VALUE;
	state->parameter_bytes = bytes;
	return CUDA_SUCCESS;
}

API cuParamSeti(CUfunction f, int offset, unsigned value)
{
	return set_parameter(f, offset, &value, sizeof(value));
}

API cuParamSetf(CUfunction f, int offset, float value)
{
	return set_parameter(f, offset, &value, sizeof(value));
}

API cuParamSetv(CUfunction f, int offset, void *value, unsigned bytes)
{
	return set_parameter(f, offset, value, bytes);
}

API cuLaunch(CUfunction f)
{
	return launch(f, 1, 1, NULL);
}

API cuLaunchGrid(CUfunction f, int width, int height)
{
	return launch(f, width, height, NULL);
}

API cuLaunchGridAsync(CUfunction f, int width, int height, CUstream stream)
{
	return launch(f, width, height, stream);
}
