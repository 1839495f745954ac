/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <string.h>

#include "exact_names.h"

static CUresult find(const char *symbol, void **function, int version, cuuint64_t flags,
		     CUdriverProcAddressQueryResult *status)
{
	const struct export *best = NULL;
	bool known = false;

	if (!symbol || !function)
		return CUDA_ERROR_INVALID_VALUE;
	for (const struct export *each = exports; each->name; each++) {
		if (!*symbol || strcmp(each->name, symbol) != 0)
			continue;
		known = true;
		if (each->version <= version && (!best || each->version > best->version))
			best = each;
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
