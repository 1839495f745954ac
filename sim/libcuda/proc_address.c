/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The versions are those in which the real driver introduced each form. */
#include "internal.h"

#include <string.h>

#include "exact_names.h"

#define ADDRESS(export) address_of_##export __asm__(#export)
#define E(name, version, export) ADDRESS(export)
#define P(name, version, export, twin) ADDRESS(export), ADDRESS(twin)
/* As symbols without prototypes: only their addresses matter here. */
extern __attribute__((visibility("default"))) const char
#include "exports.h"
	end_of_exports;
#undef E
#undef P

#define E(name, version, export) P(name, version, export, export)
#define P(name, version, export, twin)                                                                                 \
	{                                                                                                              \
		name, version, (void *)&address_of_##export, (void *)&address_of_##twin                                \
	}
static const struct entry {
	const char *name;
	int version;
	void *plain, *per_thread;
} entries[] = {
#include "exports.h"
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
