/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Memory that is set takes time and is counted as copies of its own kind. */
#include "internal.h"

static CUresult set(CUdeviceptr pointer, size_t count, size_t width, CUstream stream)
{
	size_t bytes;

	if (!is_device_address(pointer) || pointer % width || __builtin_mul_overflow(count, width, &bytes))
		return CUDA_ERROR_INVALID_VALUE;
	return copy_submit(COPY_SET, bytes, stream, false);
}

static CUresult set_2d(CUdeviceptr pointer, size_t pitch, size_t columns, size_t rows, size_t width, CUstream stream)
{
	size_t row, count;

	if (__builtin_mul_overflow(columns, width, &row) || (rows > 1 && (pitch < row || pitch % width)) ||
	    __builtin_mul_overflow(columns, rows, &count))
		return CUDA_ERROR_INVALID_VALUE;
	return set(pointer, count, width, stream);
}

API2(cuMemsetD8, cuMemsetD8_v2_ptds, (CUdeviceptr pointer, unsigned char value, size_t count),
     ((void)value, set(pointer, count, 1, NULL)))
API2(cuMemsetD16, cuMemsetD16_v2_ptds, (CUdeviceptr pointer, unsigned short value, size_t count),
     ((void)value, set(pointer, count, 2, NULL)))
API2(cuMemsetD32, cuMemsetD32_v2_ptds, (CUdeviceptr pointer, unsigned value, size_t count),
     ((void)value, set(pointer, count, 4, NULL)))
API2(cuMemsetD8Async, cuMemsetD8Async_ptsz, (CUdeviceptr pointer, unsigned char value, size_t count, CUstream stream),
     ((void)value, set(pointer, count, 1, stream)))
API2(cuMemsetD16Async, cuMemsetD16Async_ptsz,
     (CUdeviceptr pointer, unsigned short value, size_t count, CUstream stream),
     ((void)value, set(pointer, count, 2, stream)))
API2(cuMemsetD32Async, cuMemsetD32Async_ptsz, (CUdeviceptr pointer, unsigned value, size_t count, CUstream stream),
     ((void)value, set(pointer, count, 4, stream)))
API2(cuMemsetD2D8, cuMemsetD2D8_v2_ptds,
     (CUdeviceptr pointer, size_t pitch, unsigned char value, size_t columns, size_t rows),
     ((void)value, set_2d(pointer, pitch, columns, rows, 1, NULL)))
API2(cuMemsetD2D16, cuMemsetD2D16_v2_ptds,
     (CUdeviceptr pointer, size_t pitch, unsigned short value, size_t columns, size_t rows),
     ((void)value, set_2d(pointer, pitch, columns, rows, 2, NULL)))
API2(cuMemsetD2D32, cuMemsetD2D32_v2_ptds,
     (CUdeviceptr pointer, size_t pitch, unsigned value, size_t columns, size_t rows),
     ((void)value, set_2d(pointer, pitch, columns, rows, 4, NULL)))
API2(cuMemsetD2D8Async, cuMemsetD2D8Async_ptsz,
     (CUdeviceptr pointer, size_t pitch, unsigned char value, size_t columns, size_t rows, CUstream stream),
     ((void)value, set_2d(pointer, pitch, columns, rows, 1, stream)))
API2(cuMemsetD2D16Async, cuMemsetD2D16Async_ptsz,
     (CUdeviceptr pointer, size_t pitch, unsigned short value, size_t columns, size_t rows, CUstream stream),
     ((void)value, set_2d(pointer, pitch, columns, rows, 2, stream)))
API2(cuMemsetD2D32Async, cuMemsetD2D32Async_ptsz,
     (CUdeviceptr pointer, size_t pitch, unsigned value, size_t columns, size_t rows, CUstream stream),
     ((void)value, set_2d(pointer, pitch, columns, rows, 4, stream)))

/* ---- the forms of before CUDA 3.2 ---- */

#include "exact_names.h"

API cuMemsetD8(CUdeviceptr_v1 pointer, unsigned char value, unsigned count)
{
	return (void)value, set(pointer, count, 1, NULL);
}

API cuMemsetD16(CUdeviceptr_v1 pointer, unsigned short value, unsigned count)
{
	return (void)value, set(pointer, count, 2, NULL);
}

API cuMemsetD32(CUdeviceptr_v1 pointer, unsigned value, unsigned count)
{
	return (void)value, set(pointer, count, 4, NULL);
}

API cuMemsetD2D8(CUdeviceptr_v1 pointer, unsigned pitch, unsigned char value, unsigned columns, unsigned rows)
{
	return (void)value, set_2d(pointer, pitch, columns, rows, 1, NULL);
}

API cuMemsetD2D16(CUdeviceptr_v1 pointer, unsigned pitch, unsigned short value, unsigned columns, unsigned rows)
{
	return (void)value, set_2d(pointer, pitch, columns, rows, 2, NULL);
}

API cuMemsetD2D32(CUdeviceptr_v1 pointer, unsigned pitch, unsigned value, unsigned columns, unsigned rows)
{
	return (void)value, set_2d(pointer, pitch, columns, rows, 4, NULL);
}
