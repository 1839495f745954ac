/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Modules are PTX text. Only their entries are read: a name, and whether the first parameter is the duration. */
#include "internal.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct CUmod_st { /* a CUlibrary is the same thing */
	uint32_t magic;
	struct CUfunc_st *functions;
};

/* ---- reading PTX ---- */

static bool is_text(const char *image)
{
	for (int i = 0; i < 16 && image[i]; i++)
		if (!isprint((unsigned char)image[i]) && !isspace((unsigned char)image[i]))
			return false;
	return image[0] != 0;
}

/* A copy without comments. */
static char *without_comments(const char *text)
{
	char *copy = malloc(strlen(text) + 1), *to = copy;

	while (copy && *text) {
		if (text[0] == '/' && text[1] == '/') {
			text += strcspn(text, "\n");
		} else if (text[0] == '/' && text[1] == '*') {
			const char *end = strstr(text + 2, "*/");

			*to++ = ' ';
			text = end ? end + 2 : text + strlen(text);
		} else {
			*to++ = *text++;
		}
	}
	if (copy)
		*to = 0;
	return copy;
}

static const char *skip_space(const char *p)
{
	while (isspace((unsigned char)*p))
		p++;
	return p;
}

static size_t identifier_length(const char *p)
{
	size_t n = 0;

	while (isalnum((unsigned char)p[n]) || p[n] == '_' || p[n] == '$' || p[n] == '%')
		n++;
	return n;
}

/* `( .param .u64 NAME_ns` */
static bool begins_with_duration(const char *p)
{
	size_t length;

	p = skip_space(p);
	if (*p != '(')
		return false;
	p = skip_space(p + 1);
	if (strncmp(p, ".param", 6) != 0)
		return false;
	p = skip_space(p + 6);
	if (strncmp(p, ".align", 6) == 0) {
		p = skip_space(p + 6);
		p = skip_space(p + strspn(p, "0123456789"));
	}
	if (strncmp(p, ".u64", 4) != 0 || !isspace((unsigned char)p[4]))
		return false;
	p = skip_space(p + 4);
	length = identifier_length(p);
	return length >= 3 && strncmp(p + length - 3, "_ns", 3) == 0;
}

static void free_functions(struct CUfunc_st *function)
{
	while (function) {
		struct CUfunc_st *next = function->next;

		function->magic = 0;
		free(function->name);
		free(function->state);
		free(function);
		function = next;
	}
}

static struct CUfunc_st *read_entries(const char *text)
{
	struct CUfunc_st *functions = NULL, *function;

	for (const char *p = text; (p = strstr(p, ".entry")); p++) {
		const char *name = skip_space(p + 6);
		size_t length = identifier_length(name);

		if (name == p + 6 || !length)
			continue;
		function = calloc(1, sizeof(*function));
		if (function)
			function->name = strndup(name, length);
		if (!function || !function->name) {
			free(function);
			free_functions(functions);
			return NULL;
		}
		function->magic = MAGIC_FUNCTION;
		function->timed = begins_with_duration(name + length);
		function->next = functions;
		functions = function;
	}
	return functions;
}

static CUresult load(const void *image, struct CUmod_st **out)
{
	struct CUmod_st *module;
	struct CUfunc_st *functions;
	char *text;

	if (!out || !image)
		return CUDA_ERROR_INVALID_VALUE;
	if (!is_text(image))
		return CUDA_ERROR_INVALID_PTX;
	text = without_comments(image);
	if (!text)
		return CUDA_ERROR_OUT_OF_MEMORY;
	functions = read_entries(text);
	free(text);
	if (!functions)
		return CUDA_ERROR_INVALID_PTX;
	module = calloc(1, sizeof(*module));
	if (!module) {
		free_functions(functions);
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
	free_functions(module->functions);
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

CUresult function_check(CUfunction function)
{
	return function && function->magic == MAGIC_FUNCTION ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
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

API cuFuncGetName(const char **name, CUfunction function)
{
	CUresult result = name ? function_check(function) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*name = function->name;
	return result;
}

API cuKernelGetName(const char **name, CUkernel kernel)
{
	CUresult result = name ? function_check((CUfunction)kernel) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*name = ((CUfunction)kernel)->name;
	return result;
}

API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
	CUresult result = value ? function_check(function) : CUDA_ERROR_INVALID_VALUE;

	if (result != CUDA_SUCCESS)
		return result;
	*value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
		 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS	      ? 32
								      : 0;
	return CUDA_SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int threads, size_t shared_bytes)
{
	CUresult result =
		blocks && threads > 0 && threads <= 1024 ? function_check(function) : CUDA_ERROR_INVALID_VALUE;

	(void)shared_bytes;
	if (result == CUDA_SUCCESS)
		*blocks = 2048 / threads > 32 ? 32 : 2048 / threads;
	return result;
}
