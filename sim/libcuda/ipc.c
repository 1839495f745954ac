/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Device memory that processes share: a handle is the address, which is one address on the whole node. */
#include "internal.h"

#include <string.h>

API cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!handle)
		return CUDA_ERROR_INVALID_VALUE;
	result = ring_request(CMD_IPC_EXPORT, context->device, pointer, NULL);
	if (result != CUDA_SUCCESS)
		return result;
	memset(handle, 0, sizeof(*handle));
	memcpy(handle->reserved, &pointer, sizeof(pointer));
	return CUDA_SUCCESS;
}

static CUresult open_handle(CUdeviceptr *pointer, const CUipcMemHandle *handle, unsigned flags)
{
	struct CUctx_st *context;
	CUdeviceptr address;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!pointer || flags & ~(unsigned)CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
		return CUDA_ERROR_INVALID_VALUE;
	memcpy(&address, handle->reserved, sizeof(address));
	result = ring_request(CMD_IPC_OPEN, context->device, address, NULL);
	if (result == CUDA_SUCCESS)
		*pointer = address;
	return result;
}

API cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
	return open_handle(pointer, &handle, flags);
}

API cuIpcCloseMemHandle(CUdeviceptr pointer)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	return result == CUDA_SUCCESS ? ring_request(CMD_IPC_CLOSE, context->device, pointer, NULL) : result;
}

#include "exact_names.h"

API cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags);
API cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned flags)
{
	return open_handle(pointer, &handle, flags);
}
