/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The versions are those in which the real driver introduced each form. */
#include "internal.h"

#include <string.h>

/* From here on a name is the export of that very name. */
#undef cuCtxCreate
#undef cuCtxDestroy
#undef cuCtxPopCurrent
#undef cuCtxPushCurrent
#undef cuDeviceGetUuid
#undef cuDevicePrimaryCtxRelease
#undef cuDevicePrimaryCtxReset
#undef cuDeviceTotalMem
#undef cuEventDestroy
#undef cuGetProcAddress
#undef cuGraphAddKernelNode
#undef cuGraphInstantiate
#undef cuMemAlloc
#undef cuMemAllocHost
#undef cuMemAllocPitch
#undef cuMemFree
#undef cuMemGetInfo
#undef cuMemcpy2D
#undef cuMemcpy2DAsync
#undef cuMemcpy2DUnaligned
#undef cuMemcpyDtoD
#undef cuMemcpyDtoDAsync
#undef cuMemcpyDtoH
#undef cuMemcpyDtoHAsync
#undef cuMemcpyHtoD
#undef cuMemcpyHtoDAsync
#undef cuMemsetD16
#undef cuMemsetD32
#undef cuMemsetD8
#undef cuStreamBeginCapture
#undef cuStreamDestroy

/* Only their addresses matter here. */
extern __attribute__((visibility("default"))) CUresult cuCtxCreate_v3();
extern __attribute__((visibility("default"))) CUresult cuDeviceGetUuid();
extern __attribute__((visibility("default"))) CUresult cuEventRecord_ptsz();
extern __attribute__((visibility("default"))) CUresult cuGraphLaunch_ptsz();
extern __attribute__((visibility("default"))) CUresult cuLaunchCooperativeKernel_ptsz();
extern __attribute__((visibility("default"))) CUresult cuLaunchKernelEx_ptsz();
extern __attribute__((visibility("default"))) CUresult cuLaunchKernel_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemAllocAsync_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemAllocFromPoolAsync_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemFreeAsync_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemPrefetchAsync_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemcpy2DAsync_v2_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemcpy2DUnaligned_v2_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemcpy2D_v2_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemcpyAsync_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemcpyDtoDAsync_v2_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemcpyDtoD_v2_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemcpyDtoHAsync_v2_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemcpyDtoH_v2_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemcpyHtoDAsync_v2_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemcpyHtoD_v2_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemcpyPeerAsync_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemcpyPeer_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemcpy_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemsetD16Async_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemsetD16_v2_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemsetD32Async_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemsetD32_v2_ptds();
extern __attribute__((visibility("default"))) CUresult cuMemsetD8Async_ptsz();
extern __attribute__((visibility("default"))) CUresult cuMemsetD8_v2_ptds();
extern __attribute__((visibility("default"))) CUresult cuStreamQuery_ptsz();
extern __attribute__((visibility("default"))) CUresult cuStreamSynchronize_ptsz();
extern __attribute__((visibility("default"))) CUresult cuStreamWaitEvent_ptsz();

API cuGetProcAddress(const char *symbol, void **function, int cuda_version, cuuint64_t flags);

static const struct entry {
	const char *name;
	int version;
	void *plain, *per_thread;
} entries[] = {
#define E(name, version, plain)                                                                                        \
	{                                                                                                              \
		name, version, (void *)plain, (void *)plain                                                            \
	}
#define P(name, version, plain, per_thread)                                                                            \
	{                                                                                                              \
		name, version, (void *)plain, (void *)per_thread                                                       \
	}
	E("cuCtxCreate", 3020, cuCtxCreate_v2),
	E("cuCtxCreate", 11040, cuCtxCreate_v3),
	E("cuCtxDestroy", 4000, cuCtxDestroy_v2),
	E("cuCtxGetCurrent", 4000, cuCtxGetCurrent),
	E("cuCtxGetDevice", 2000, cuCtxGetDevice),
	E("cuCtxGetStreamPriorityRange", 5050, cuCtxGetStreamPriorityRange),
	E("cuCtxPopCurrent", 4000, cuCtxPopCurrent_v2),
	E("cuCtxPushCurrent", 4000, cuCtxPushCurrent_v2),
	E("cuCtxSetCurrent", 4000, cuCtxSetCurrent),
	E("cuCtxSynchronize", 2000, cuCtxSynchronize),
	E("cuDeviceGet", 2000, cuDeviceGet),
	E("cuDeviceGetAttribute", 2000, cuDeviceGetAttribute),
	E("cuDeviceGetByPCIBusId", 4010, cuDeviceGetByPCIBusId),
	E("cuDeviceGetCount", 2000, cuDeviceGetCount),
	E("cuDeviceGetName", 2000, cuDeviceGetName),
	E("cuDeviceGetPCIBusId", 4010, cuDeviceGetPCIBusId),
	E("cuDeviceGetUuid", 9020, cuDeviceGetUuid),
	E("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2),
	E("cuDevicePrimaryCtxRelease", 11000, cuDevicePrimaryCtxRelease_v2),
	E("cuDevicePrimaryCtxReset", 11000, cuDevicePrimaryCtxReset_v2),
	E("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain),
	E("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2),
	E("cuDriverGetVersion", 2020, cuDriverGetVersion),
	E("cuEventCreate", 2000, cuEventCreate),
	E("cuEventDestroy", 4000, cuEventDestroy_v2),
	E("cuEventElapsedTime", 2000, cuEventElapsedTime),
	E("cuEventQuery", 2000, cuEventQuery),
	P("cuEventRecord", 2000, cuEventRecord, cuEventRecord_ptsz),
	E("cuEventSynchronize", 2000, cuEventSynchronize),
	E("cuFuncGetAttribute", 2020, cuFuncGetAttribute),
	E("cuFuncGetName", 12030, cuFuncGetName),
	E("cuGetErrorName", 6000, cuGetErrorName),
	E("cuGetErrorString", 6000, cuGetErrorString),
	E("cuGetProcAddress", 11030, cuGetProcAddress),
	E("cuGetProcAddress", 12000, cuGetProcAddress_v2),
	E("cuGraphAddKernelNode", 12000, cuGraphAddKernelNode_v2),
	E("cuGraphCreate", 10000, cuGraphCreate),
	E("cuGraphDestroy", 10000, cuGraphDestroy),
	E("cuGraphExecDestroy", 10000, cuGraphExecDestroy),
	E("cuGraphGetNodes", 10000, cuGraphGetNodes),
	E("cuGraphInstantiate", 12000, cuGraphInstantiateWithFlags),
	E("cuGraphInstantiateWithFlags", 11040, cuGraphInstantiateWithFlags),
	P("cuGraphLaunch", 10000, cuGraphLaunch, cuGraphLaunch_ptsz),
	E("cuInit", 2000, cuInit),
	E("cuKernelGetFunction", 12000, cuKernelGetFunction),
	P("cuLaunchCooperativeKernel", 9000, cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz),
	E("cuLaunchHostFunc", 10000, cuLaunchHostFunc),
	P("cuLaunchKernel", 4000, cuLaunchKernel, cuLaunchKernel_ptsz),
	P("cuLaunchKernelEx", 11060, cuLaunchKernelEx, cuLaunchKernelEx_ptsz),
	E("cuLibraryGetKernel", 12000, cuLibraryGetKernel),
	E("cuLibraryLoadData", 12000, cuLibraryLoadData),
	E("cuLibraryUnload", 12000, cuLibraryUnload),
	E("cuMemAddressFree", 10020, cuMemAddressFree),
	E("cuMemAddressReserve", 10020, cuMemAddressReserve),
	E("cuMemAlloc", 3020, cuMemAlloc_v2),
	P("cuMemAllocAsync", 11020, cuMemAllocAsync, cuMemAllocAsync_ptsz),
	P("cuMemAllocFromPoolAsync", 11020, cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz),
	E("cuMemAllocHost", 3020, cuMemAllocHost_v2),
	E("cuMemAllocManaged", 6000, cuMemAllocManaged),
	E("cuMemAllocPitch", 3020, cuMemAllocPitch_v2),
	E("cuMemCreate", 10020, cuMemCreate),
	E("cuMemFree", 3020, cuMemFree_v2),
	P("cuMemFreeAsync", 11020, cuMemFreeAsync, cuMemFreeAsync_ptsz),
	E("cuMemFreeHost", 2000, cuMemFreeHost),
	E("cuMemGetInfo", 3020, cuMemGetInfo_v2),
	E("cuMemHostAlloc", 2020, cuMemHostAlloc),
	E("cuMemMap", 10020, cuMemMap),
	P("cuMemPrefetchAsync", 8000, cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz),
	E("cuMemRelease", 10020, cuMemRelease),
	E("cuMemSetAccess", 10020, cuMemSetAccess),
	E("cuMemUnmap", 10020, cuMemUnmap),
	P("cuMemcpy", 4000, cuMemcpy, cuMemcpy_ptds),
	P("cuMemcpy2D", 3020, cuMemcpy2D_v2, cuMemcpy2D_v2_ptds),
	P("cuMemcpy2DAsync", 3020, cuMemcpy2DAsync_v2, cuMemcpy2DAsync_v2_ptsz),
	P("cuMemcpy2DUnaligned", 3020, cuMemcpy2DUnaligned_v2, cuMemcpy2DUnaligned_v2_ptds),
	P("cuMemcpyAsync", 4000, cuMemcpyAsync, cuMemcpyAsync_ptsz),
	P("cuMemcpyDtoD", 3020, cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds),
	P("cuMemcpyDtoDAsync", 3020, cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz),
	P("cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds),
	P("cuMemcpyDtoHAsync", 3020, cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz),
	P("cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds),
	P("cuMemcpyHtoDAsync", 3020, cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz),
	P("cuMemcpyPeer", 4000, cuMemcpyPeer, cuMemcpyPeer_ptds),
	P("cuMemcpyPeerAsync", 4000, cuMemcpyPeerAsync, cuMemcpyPeerAsync_ptsz),
	P("cuMemsetD16", 3020, cuMemsetD16_v2, cuMemsetD16_v2_ptds),
	P("cuMemsetD16Async", 3020, cuMemsetD16Async, cuMemsetD16Async_ptsz),
	P("cuMemsetD32", 3020, cuMemsetD32_v2, cuMemsetD32_v2_ptds),
	P("cuMemsetD32Async", 3020, cuMemsetD32Async, cuMemsetD32Async_ptsz),
	P("cuMemsetD8", 3020, cuMemsetD8_v2, cuMemsetD8_v2_ptds),
	P("cuMemsetD8Async", 3020, cuMemsetD8Async, cuMemsetD8Async_ptsz),
	E("cuModuleGetFunction", 2000, cuModuleGetFunction),
	E("cuModuleLoad", 2000, cuModuleLoad),
	E("cuModuleLoadData", 2000, cuModuleLoadData),
	E("cuModuleLoadDataEx", 2010, cuModuleLoadDataEx),
	E("cuModuleUnload", 2000, cuModuleUnload),
	E("cuOccupancyMaxActiveBlocksPerMultiprocessor", 6050, cuOccupancyMaxActiveBlocksPerMultiprocessor),
	E("cuStreamBeginCapture", 10010, cuStreamBeginCapture_v2),
	E("cuStreamCreate", 2000, cuStreamCreate),
	E("cuStreamCreateWithPriority", 5050, cuStreamCreateWithPriority),
	E("cuStreamDestroy", 4000, cuStreamDestroy_v2),
	E("cuStreamEndCapture", 10000, cuStreamEndCapture),
	P("cuStreamQuery", 2000, cuStreamQuery, cuStreamQuery_ptsz),
	P("cuStreamSynchronize", 2000, cuStreamSynchronize, cuStreamSynchronize_ptsz),
	P("cuStreamWaitEvent", 3020, cuStreamWaitEvent, cuStreamWaitEvent_ptsz),
#undef E
#undef P
};

static CUresult find(const char *symbol, void **function, int version, cuuint64_t flags,
		     CUdriverProcAddressQueryResult *status)
{
	const struct entry *best = NULL;
	bool known = false;

	if (!symbol || !function)
		return CUDA_ERROR_INVALID_VALUE;
	for (size_t i = 0; i < sizeof(entries) / sizeof(entries[0]); i++) {
		if (strcmp(entries[i].name, symbol) != 0)
			continue;
		known = true;
		if (entries[i].version <= version && (!best || entries[i].version > best->version))
			best = &entries[i];
	}
	*function = NULL;
	if (best)
		*function = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM ? best->per_thread : best->plain;
	if (status)
		*status = best	  ? CU_GET_PROC_ADDRESS_SUCCESS
			  : known ? CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT
				  : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
	return best ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

API cuGetProcAddress(const char *symbol, void **function, int cuda_version, cuuint64_t flags)
{
	return find(symbol, function, cuda_version, flags, NULL);
}

API cuGetProcAddress_v2(const char *symbol, void **function, int cuda_version, cuuint64_t flags,
			CUdriverProcAddressQueryResult *status)
{
	return find(symbol, function, cuda_version, flags, status);
}
