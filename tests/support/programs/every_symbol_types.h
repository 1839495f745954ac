/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The types of the newest forms as `T(name)`; after this a name is the symbol of that very name. Included by every_symbol.c.
 */
#define T(name) type_of_##name

typedef __typeof__(cuArray3DCreate) type_of_cuArray3DCreate;
typedef __typeof__(cuArrayCreate) type_of_cuArrayCreate;
typedef __typeof__(cuArrayDestroy) type_of_cuArrayDestroy;
typedef __typeof__(cuCtxAttach) type_of_cuCtxAttach;
typedef __typeof__(cuCtxCreate) type_of_cuCtxCreate;
typedef __typeof__(cuCtxCreate_v3) type_of_cuCtxCreate_v3;
typedef __typeof__(cuCtxCreate_v4) type_of_cuCtxCreate_v4;
typedef __typeof__(cuCtxDestroy) type_of_cuCtxDestroy;
typedef __typeof__(cuCtxDetach) type_of_cuCtxDetach;
typedef __typeof__(cuCtxFromGreenCtx) type_of_cuCtxFromGreenCtx;
typedef __typeof__(cuCtxPopCurrent) type_of_cuCtxPopCurrent;
typedef __typeof__(cuCtxPushCurrent) type_of_cuCtxPushCurrent;
typedef __typeof__(cuCtxSetCurrent) type_of_cuCtxSetCurrent;
typedef __typeof__(cuCtxSynchronize) type_of_cuCtxSynchronize;
typedef __typeof__(cuCtxSynchronize_v2) type_of_cuCtxSynchronize_v2;
typedef __typeof__(cuDevResourceGenerateDesc) type_of_cuDevResourceGenerateDesc;
typedef __typeof__(cuDeviceGetByPCIBusId) type_of_cuDeviceGetByPCIBusId;
typedef __typeof__(cuDeviceGetDevResource) type_of_cuDeviceGetDevResource;
typedef __typeof__(cuDeviceGetPCIBusId) type_of_cuDeviceGetPCIBusId;
typedef __typeof__(cuDevicePrimaryCtxRelease) type_of_cuDevicePrimaryCtxRelease;
typedef __typeof__(cuDevicePrimaryCtxReset) type_of_cuDevicePrimaryCtxReset;
typedef __typeof__(cuDevicePrimaryCtxRetain) type_of_cuDevicePrimaryCtxRetain;
typedef __typeof__(cuEventCreate) type_of_cuEventCreate;
typedef __typeof__(cuEventRecord) type_of_cuEventRecord;
typedef __typeof__(cuEventSynchronize) type_of_cuEventSynchronize;
typedef __typeof__(cuFuncGetName) type_of_cuFuncGetName;
typedef __typeof__(cuFuncSetBlockShape) type_of_cuFuncSetBlockShape;
typedef __typeof__(cuFuncSetSharedSize) type_of_cuFuncSetSharedSize;
typedef __typeof__(cuGraphAddChildGraphNode) type_of_cuGraphAddChildGraphNode;
typedef __typeof__(cuGraphAddEmptyNode) type_of_cuGraphAddEmptyNode;
typedef __typeof__(cuGraphAddKernelNode) type_of_cuGraphAddKernelNode;
typedef __typeof__(cuGraphAddMemcpyNode) type_of_cuGraphAddMemcpyNode;
typedef __typeof__(cuGraphAddMemsetNode) type_of_cuGraphAddMemsetNode;
typedef __typeof__(cuGraphAddNode) type_of_cuGraphAddNode;
typedef __typeof__(cuGraphAddNode_v2) type_of_cuGraphAddNode_v2;
typedef __typeof__(cuGraphClone) type_of_cuGraphClone;
typedef __typeof__(cuGraphCreate) type_of_cuGraphCreate;
typedef __typeof__(cuGraphDestroy) type_of_cuGraphDestroy;
typedef __typeof__(cuGraphExecDestroy) type_of_cuGraphExecDestroy;
typedef __typeof__(cuGraphExecUpdate) type_of_cuGraphExecUpdate;
typedef __typeof__(cuGraphInstantiate) type_of_cuGraphInstantiate;
typedef __typeof__(cuGraphInstantiateWithParams) type_of_cuGraphInstantiateWithParams;
typedef __typeof__(cuGraphLaunch) type_of_cuGraphLaunch;
typedef __typeof__(cuGraphUpload) type_of_cuGraphUpload;
typedef __typeof__(cuGreenCtxCreate) type_of_cuGreenCtxCreate;
typedef __typeof__(cuGreenCtxDestroy) type_of_cuGreenCtxDestroy;
typedef __typeof__(cuInit) type_of_cuInit;
typedef __typeof__(cuKernelGetFunction) type_of_cuKernelGetFunction;
typedef __typeof__(cuKernelGetName) type_of_cuKernelGetName;
typedef __typeof__(cuLaunch) type_of_cuLaunch;
typedef __typeof__(cuLaunchCooperativeKernel) type_of_cuLaunchCooperativeKernel;
typedef __typeof__(cuLaunchCooperativeKernelMultiDevice) type_of_cuLaunchCooperativeKernelMultiDevice;
typedef __typeof__(cuLaunchGrid) type_of_cuLaunchGrid;
typedef __typeof__(cuLaunchGridAsync) type_of_cuLaunchGridAsync;
typedef __typeof__(cuLaunchKernel) type_of_cuLaunchKernel;
typedef __typeof__(cuLaunchKernelEx) type_of_cuLaunchKernelEx;
typedef __typeof__(cuLibraryGetKernel) type_of_cuLibraryGetKernel;
typedef __typeof__(cuLibraryGetKernelCount) type_of_cuLibraryGetKernelCount;
typedef __typeof__(cuLibraryGetModule) type_of_cuLibraryGetModule;
typedef __typeof__(cuLibraryLoadData) type_of_cuLibraryLoadData;
typedef __typeof__(cuMemAddressReserve) type_of_cuMemAddressReserve;
typedef __typeof__(cuMemAlloc) type_of_cuMemAlloc;
typedef __typeof__(cuMemAllocAsync) type_of_cuMemAllocAsync;
typedef __typeof__(cuMemAllocFromPoolAsync) type_of_cuMemAllocFromPoolAsync;
typedef __typeof__(cuMemAllocHost) type_of_cuMemAllocHost;
typedef __typeof__(cuMemAllocManaged) type_of_cuMemAllocManaged;
typedef __typeof__(cuMemAllocPitch) type_of_cuMemAllocPitch;
typedef __typeof__(cuMemCreate) type_of_cuMemCreate;
typedef __typeof__(cuMemExportToShareableHandle) type_of_cuMemExportToShareableHandle;
typedef __typeof__(cuMemFree) type_of_cuMemFree;
typedef __typeof__(cuMemFreeAsync) type_of_cuMemFreeAsync;
typedef __typeof__(cuMemFreeHost) type_of_cuMemFreeHost;
typedef __typeof__(cuMemHostAlloc) type_of_cuMemHostAlloc;
typedef __typeof__(cuMemHostGetDevicePointer) type_of_cuMemHostGetDevicePointer;
typedef __typeof__(cuMemHostRegister) type_of_cuMemHostRegister;
typedef __typeof__(cuMemHostUnregister) type_of_cuMemHostUnregister;
typedef __typeof__(cuMemImportFromShareableHandle) type_of_cuMemImportFromShareableHandle;
typedef __typeof__(cuMemMap) type_of_cuMemMap;
typedef __typeof__(cuMemPrefetchAsync) type_of_cuMemPrefetchAsync;
typedef __typeof__(cuMemPrefetchAsync_v2) type_of_cuMemPrefetchAsync_v2;
typedef __typeof__(cuMemPrefetchBatchAsync) type_of_cuMemPrefetchBatchAsync;
typedef __typeof__(cuMemRelease) type_of_cuMemRelease;
typedef __typeof__(cuMemRetainAllocationHandle) type_of_cuMemRetainAllocationHandle;
typedef __typeof__(cuMemUnmap) type_of_cuMemUnmap;
typedef __typeof__(cuMemcpy) type_of_cuMemcpy;
typedef __typeof__(cuMemcpy2D) type_of_cuMemcpy2D;
typedef __typeof__(cuMemcpy2DAsync) type_of_cuMemcpy2DAsync;
typedef __typeof__(cuMemcpy2DUnaligned) type_of_cuMemcpy2DUnaligned;
typedef __typeof__(cuMemcpy3D) type_of_cuMemcpy3D;
typedef __typeof__(cuMemcpy3DAsync) type_of_cuMemcpy3DAsync;
typedef __typeof__(cuMemcpy3DBatchAsync) type_of_cuMemcpy3DBatchAsync;
typedef __typeof__(cuMemcpy3DBatchAsync_v2) type_of_cuMemcpy3DBatchAsync_v2;
typedef __typeof__(cuMemcpy3DPeer) type_of_cuMemcpy3DPeer;
typedef __typeof__(cuMemcpy3DPeerAsync) type_of_cuMemcpy3DPeerAsync;
typedef __typeof__(cuMemcpy3DWithAttributesAsync) type_of_cuMemcpy3DWithAttributesAsync;
typedef __typeof__(cuMemcpyAsync) type_of_cuMemcpyAsync;
typedef __typeof__(cuMemcpyAtoA) type_of_cuMemcpyAtoA;
typedef __typeof__(cuMemcpyAtoD) type_of_cuMemcpyAtoD;
typedef __typeof__(cuMemcpyAtoH) type_of_cuMemcpyAtoH;
typedef __typeof__(cuMemcpyAtoHAsync) type_of_cuMemcpyAtoHAsync;
typedef __typeof__(cuMemcpyBatchAsync) type_of_cuMemcpyBatchAsync;
typedef __typeof__(cuMemcpyBatchAsync_v2) type_of_cuMemcpyBatchAsync_v2;
typedef __typeof__(cuMemcpyDtoA) type_of_cuMemcpyDtoA;
typedef __typeof__(cuMemcpyDtoD) type_of_cuMemcpyDtoD;
typedef __typeof__(cuMemcpyDtoDAsync) type_of_cuMemcpyDtoDAsync;
typedef __typeof__(cuMemcpyDtoH) type_of_cuMemcpyDtoH;
typedef __typeof__(cuMemcpyDtoHAsync) type_of_cuMemcpyDtoHAsync;
typedef __typeof__(cuMemcpyHtoA) type_of_cuMemcpyHtoA;
typedef __typeof__(cuMemcpyHtoAAsync) type_of_cuMemcpyHtoAAsync;
typedef __typeof__(cuMemcpyHtoD) type_of_cuMemcpyHtoD;
typedef __typeof__(cuMemcpyHtoDAsync) type_of_cuMemcpyHtoDAsync;
typedef __typeof__(cuMemcpyPeer) type_of_cuMemcpyPeer;
typedef __typeof__(cuMemcpyPeerAsync) type_of_cuMemcpyPeerAsync;
typedef __typeof__(cuMemcpyWithAttributesAsync) type_of_cuMemcpyWithAttributesAsync;
typedef __typeof__(cuMemsetD16) type_of_cuMemsetD16;
typedef __typeof__(cuMemsetD16Async) type_of_cuMemsetD16Async;
typedef __typeof__(cuMemsetD2D16) type_of_cuMemsetD2D16;
typedef __typeof__(cuMemsetD2D16Async) type_of_cuMemsetD2D16Async;
typedef __typeof__(cuMemsetD2D32) type_of_cuMemsetD2D32;
typedef __typeof__(cuMemsetD2D32Async) type_of_cuMemsetD2D32Async;
typedef __typeof__(cuMemsetD2D8) type_of_cuMemsetD2D8;
typedef __typeof__(cuMemsetD2D8Async) type_of_cuMemsetD2D8Async;
typedef __typeof__(cuMemsetD32) type_of_cuMemsetD32;
typedef __typeof__(cuMemsetD32Async) type_of_cuMemsetD32Async;
typedef __typeof__(cuMemsetD8) type_of_cuMemsetD8;
typedef __typeof__(cuMemsetD8Async) type_of_cuMemsetD8Async;
typedef __typeof__(cuMipmappedArrayCreate) type_of_cuMipmappedArrayCreate;
typedef __typeof__(cuMipmappedArrayDestroy) type_of_cuMipmappedArrayDestroy;
typedef __typeof__(cuModuleGetFunction) type_of_cuModuleGetFunction;
typedef __typeof__(cuModuleGetFunctionCount) type_of_cuModuleGetFunctionCount;
typedef __typeof__(cuModuleLoadData) type_of_cuModuleLoadData;
typedef __typeof__(cuParamSetSize) type_of_cuParamSetSize;
typedef __typeof__(cuParamSetf) type_of_cuParamSetf;
typedef __typeof__(cuParamSeti) type_of_cuParamSeti;
typedef __typeof__(cuParamSetv) type_of_cuParamSetv;
typedef __typeof__(cuStreamBeginCapture) type_of_cuStreamBeginCapture;
typedef __typeof__(cuStreamCreate) type_of_cuStreamCreate;
typedef __typeof__(cuStreamEndCapture) type_of_cuStreamEndCapture;
typedef __typeof__(cuStreamGetCaptureInfo) type_of_cuStreamGetCaptureInfo;
typedef __typeof__(cuStreamIsCapturing) type_of_cuStreamIsCapturing;
typedef __typeof__(cuStreamSynchronize) type_of_cuStreamSynchronize;
typedef __typeof__(cuThreadExchangeStreamCaptureMode) type_of_cuThreadExchangeStreamCaptureMode;

#undef cuArray3DCreate
#undef cuArrayCreate
#undef cuArrayGetDescriptor
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
#undef cuGraphExecUpdate
#undef cuGraphInstantiate
#undef cuMemAlloc
#undef cuMemAllocHost
#undef cuMemAllocPitch
#undef cuMemFree
#undef cuMemGetInfo
#undef cuMemHostGetDevicePointer
#undef cuMemHostRegister
#undef cuMemcpy2D
#undef cuMemcpy2DAsync
#undef cuMemcpy2DUnaligned
#undef cuMemcpy3D
#undef cuMemcpy3DAsync
#undef cuMemcpyAtoA
#undef cuMemcpyAtoD
#undef cuMemcpyAtoH
#undef cuMemcpyAtoHAsync
#undef cuMemcpyDtoA
#undef cuMemcpyDtoD
#undef cuMemcpyDtoDAsync
#undef cuMemcpyDtoH
#undef cuMemcpyDtoHAsync
#undef cuMemcpyHtoA
#undef cuMemcpyHtoAAsync
#undef cuMemcpyHtoD
#undef cuMemcpyHtoDAsync
#undef cuMemsetD16
#undef cuMemsetD2D16
#undef cuMemsetD2D32
#undef cuMemsetD2D8
#undef cuMemsetD32
#undef cuMemsetD8
#undef cuStreamBeginCapture
#undef cuStreamDestroy
#undef cuStreamGetCaptureInfo
