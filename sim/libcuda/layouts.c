/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Probes read these structs at the offsets at which the real driver has them. */
#include "internal.h"

#define AT(type, field, offset) _Static_assert(offsetof(type, field) == (offset), #type "." #field)
#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), #type)

AT(CUlaunchConfig, sharedMemBytes, 24);
AT(CUlaunchConfig, hStream, 32);
AT(CUlaunchConfig, attrs, 40);
SIZE(CUlaunchConfig, 56);
AT(CUDA_LAUNCH_PARAMS, gridDimX, 8);
AT(CUDA_LAUNCH_PARAMS, sharedMemBytes, 32);
AT(CUDA_LAUNCH_PARAMS, hStream, 40);
AT(CUDA_LAUNCH_PARAMS, kernelParams, 48);
SIZE(CUDA_LAUNCH_PARAMS, 56);

AT(CUDA_ARRAY_DESCRIPTOR, Format, 16);
SIZE(CUDA_ARRAY_DESCRIPTOR, 24);
AT(CUDA_ARRAY_DESCRIPTOR_v1, Format, 8);
SIZE(CUDA_ARRAY_DESCRIPTOR_v1, 16);
AT(CUDA_ARRAY3D_DESCRIPTOR, Format, 24);
AT(CUDA_ARRAY3D_DESCRIPTOR, Flags, 32);
SIZE(CUDA_ARRAY3D_DESCRIPTOR, 40);
AT(CUDA_ARRAY3D_DESCRIPTOR_v1, Format, 12);
SIZE(CUDA_ARRAY3D_DESCRIPTOR_v1, 24);

AT(CUDA_MEMCPY2D, srcMemoryType, 16);
AT(CUDA_MEMCPY2D, srcDevice, 32);
AT(CUDA_MEMCPY2D, dstMemoryType, 72);
AT(CUDA_MEMCPY2D, dstDevice, 88);
AT(CUDA_MEMCPY2D, WidthInBytes, 112);
SIZE(CUDA_MEMCPY2D, 128);
AT(CUDA_MEMCPY2D_v1, srcMemoryType, 8);
AT(CUDA_MEMCPY2D_v1, srcDevice, 24);
AT(CUDA_MEMCPY2D_v1, dstMemoryType, 52);
AT(CUDA_MEMCPY2D_v1, dstDevice, 64);
AT(CUDA_MEMCPY2D_v1, WidthInBytes, 84);
SIZE(CUDA_MEMCPY2D_v1, 96);
AT(CUDA_MEMCPY3D, srcMemoryType, 32);
AT(CUDA_MEMCPY3D, srcDevice, 48);
AT(CUDA_MEMCPY3D, dstMemoryType, 120);
AT(CUDA_MEMCPY3D, dstDevice, 136);
AT(CUDA_MEMCPY3D, WidthInBytes, 176);
SIZE(CUDA_MEMCPY3D, 200);
AT(CUDA_MEMCPY3D_v1, srcMemoryType, 16);
AT(CUDA_MEMCPY3D_v1, srcDevice, 32);
AT(CUDA_MEMCPY3D_v1, dstMemoryType, 80);
AT(CUDA_MEMCPY3D_v1, dstDevice, 96);
AT(CUDA_MEMCPY3D_v1, WidthInBytes, 128);
SIZE(CUDA_MEMCPY3D_v1, 144);
AT(CUDA_MEMCPY3D_PEER, srcContext, 64);
AT(CUDA_MEMCPY3D_PEER, dstContext, 152);
AT(CUDA_MEMCPY3D_PEER, WidthInBytes, 176);
SIZE(CUDA_MEMCPY3D_PEER, 200);
SIZE(CUmemLocation, 8);
SIZE(CUmemcpyAttributes, 24);
AT(CUmemcpy3DOperand, op, 8);
SIZE(CUmemcpy3DOperand, 40);
AT(CUDA_MEMCPY3D_BATCH_OP, dst, 40);
AT(CUDA_MEMCPY3D_BATCH_OP, extent, 80);
SIZE(CUDA_MEMCPY3D_BATCH_OP, 112);
SIZE(CUdevResource, 144);

AT(CUDA_KERNEL_NODE_PARAMS_v1, kernelParams, 40);
SIZE(CUDA_KERNEL_NODE_PARAMS_v1, 56);
AT(CUDA_KERNEL_NODE_PARAMS, kernelParams, 40);
AT(CUDA_KERNEL_NODE_PARAMS, kern, 56);
SIZE(CUDA_KERNEL_NODE_PARAMS, 72);
AT(CUDA_MEMSET_NODE_PARAMS, width, 24);
AT(CUDA_MEMCPY_NODE_PARAMS, copyParams, 16);
AT(CUDA_MEM_ALLOC_NODE_PARAMS, poolProps.location, 8);
AT(CUDA_MEM_ALLOC_NODE_PARAMS, bytesize, 104);
AT(CUDA_MEM_ALLOC_NODE_PARAMS, dptr, 112);
SIZE(CUDA_MEM_ALLOC_NODE_PARAMS, 120);
AT(CUgraphNodeParams, kernel, 16);
AT(CUgraphNodeParams, graph, 16);
AT(CUgraphNodeParams, reserved2, 248);
SIZE(CUgraphNodeParams, 256);
SIZE(CUgraphEdgeData, 8);
AT(CUDA_GRAPH_INSTANTIATE_PARAMS, hUploadStream, 8);
SIZE(CUDA_GRAPH_INSTANTIATE_PARAMS, 32);
SIZE(CUgraphExecUpdateResultInfo, 24);
AT(CUctxCreateParams, cigParams, 16);
SIZE(CUctxCreateParams, 24);
