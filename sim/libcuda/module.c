/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
#include "internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CUmod_st { /* a CUlibrary is the same thing */
	uint32_t magic;
	struct CUfunc_st *functions;
};

static CUresult load(const void *image, struct CUmod_st **out)
{
	struct CUmod_st *module;
	struct CUfunc_st *functions = NULL;
	CUresult result = out && image ? image_read(image, &functions) : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS)
		return result;
	module = calloc(1, sizeof(*module));
	if (!module) {
		functions_free(functions);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	*module = (struct CUmod_st){MAGIC_MODULE, functions};
	*out = module;
	return CUDA_SUCCESS;
}

static CUresult unload(struct CUmod_st *module)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!module || module->magic != MAGIC_MODULE)
		return CUDA_ERROR_INVALID_HANDLE;
	functions_free(module->functions);
	module->magic = 0;
	free(module);
	return CUDA_SUCCESS;
}

static CUresult find(struct CUmod_st *module, const char *name, struct CUfunc_st **out)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!out || !name)
		return CUDA_ERROR_INVALID_VALUE;
	if (!module || module->magic != MAGIC_MODULE)
		return CUDA_ERROR_INVALID_HANDLE;
	for (struct CUfunc_st *f = module->functions; f; f = f->next)
		if (strcmp(f->name, name) == 0) {
			*out = f;
			return CUDA_SUCCESS;
		}
	return CUDA_ERROR_NOT_FOUND;
}

static CUresult count(const struct CUmod_st *module, unsigned *out)
{
	CUresult result = ready();

	if (result != CUDA_SUCCESS)
		return result;
	if (!out)
		return CUDA_ERROR_INVALID_VALUE;
	if (!module || module->magic != MAGIC_MODULE)
		return CUDA_ERROR_INVALID_HANDLE;
	*out = 0;
	for (const struct CUfunc_st *f = module->functions; f; f = f->next)
		++*out;
	return CUDA_SUCCESS;
}

static CUresult read_file(const char *path, char **text)
{
	FILE *file = path ? fopen(path, "rbe") : NULL;
	size_t have = 0, room = 0;

	*text = NULL;
	if (!file)
		return CUDA_ERROR_FILE_NOT_FOUND;
	do {
		char *larger = realloc(*text, (room = room * 2 + 4096) + 1);

		if (!larger) {
			free(*text);
			fclose(file);
			return CUDA_ERROR_OUT_OF_MEMORY;
		}
		*text = larger;
		have += fread(*text + have, 1, room - have, file);
	} while (have == room);
	fclose(file);
	(*text)[have] = 0;
	return CUDA_SUCCESS;
}

/* ---- exports ---- */

static CUresult load_here(CUmodule *module, const void *image)
{
	struct CUctx_st *context;
	CUresult result = context_current(&context);

	return result == CUDA_SUCCESS ? load(image, module) : result;
}

API cuModuleLoad(CUmodule *module, const char *path)
{
	char *text;
	CUresult result = read_file(path, &text);

	if (result != CUDA_SUCCESS)
		return result;
	result = load_here(module, text);
	free(text);
	return result;
}

API cuModuleLoadData(CUmodule *module, const void *image)
{
	return load_here(module, image);
}

API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values)
{
	(void)count, (void)options, (void)values;
	return load_here(module, image);
}

API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
	return find(module, name, function);
}

API cuModuleGetFunctionCount(unsigned *number, CUmodule module)
{
	return count(module, number);
}

API cuModuleUnload(CUmodule module)
{
	return unload(module);
}

API cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *jit, void **jit_values, unsigned jits,
		      CUlibraryOption *options, void **values, unsigned count)
{
	CUresult result = ready();

	(void)jit, (void)jit_values, (void)jits, (void)options, (void)values, (void)count;
	return result == CUDA_SUCCESS ? load(image, (struct CUmod_st **)library) : result;
}

API cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
	return find((struct CUmod_st *)library, name, (struct CUfunc_st **)kernel);
}

API cuLibraryGetKernelCount(unsigned *number, CUlibrary library)
{
	return count((struct CUmod_st *)library, number);
}

/* It goes with its library: it must not be unloaded on its own. */
API cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
	struct CUctx_st *context;
	CUmodule same = (CUmodule)library;
	CUresult result = context_current(&context);

	if (result != CUDA_SUCCESS)
		return result;
	if (!module)
		return CUDA_ERROR_INVALID_VALUE;
	if (!same || same->magic != MAGIC_MODULE)
		return CUDA_ERROR_INVALID_HANDLE;
	*module = same;
	return CUDA_SUCCESS;
}

API cuLibraryUnload(CUlibrary library)
{
	return unload((struct CUmod_st *)library);
}

API cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
	CUresult result = ready();

	if (result == CUDA_SUCCESS)
		result = function ? function_check((CUfunction)kernel) : CUDA_ERROR_INVALID_VALUE;
	if (result == CUDA_SUCCESS)
		*function = (CUfunction)kernel;
	return result;
}
