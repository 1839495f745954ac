/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What a module is loaded from: PTX text, or a cubin, the ELF file that ptxas and nvJitLink write. Nothing of it is
 * run: what is read are the kernels' names, what they need of an SM, and of PTX whether the first parameter is the
 * duration. An image comes without its length, as with a real driver: what its own headers say of it is believed.
 */
#include "internal.h"

#include <ctype.h>
#include <elf.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of CUDA 12.8. */
#define NEWEST_PTX 807
#define JIT_REGISTERS 32 /* of a kernel that is compiled from PTX, which nothing here does */

#define FATBIN_MAGIC "\x50\xed\x55\xba"
#define FATBIN_WRAPPER_MAGIC "\xb1\x43\x62\x46"

#define ELF_CUDA 190
#define OSABI_CUDA 0x33 /* the architecture is in bits 0 to 7 of e_flags */
#define OSABI_CUDA_13 0x41 /* in bits 8 to 15; also 12.8's for sm_100 and later */
#define OTHER_KERNEL 0x10 /* in st_other */
#define INFO_SIZED 4 /* form of an attribute that says how long it is */
#define INFO_MAX_THREADS 0x05
#define INFO_REGISTERS 0x2f

static struct CUfunc_st *function_new(const char *name, size_t length)
{
	struct CUfunc_st *function = calloc(1, sizeof(*function));

	if (function)
		function->name = strndup(name, length);
	if (!function || !function->name) {
		free(function);
		return NULL;
	}
	function->magic = MAGIC_FUNCTION;
	function->max_threads = MAX_BLOCK;
	return function;
}

void functions_free(struct CUfunc_st *function)
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

static unsigned block_of(const unsigned sides[3])
{
	uint64_t threads = (uint64_t)sides[0] * sides[1] * sides[2];

	return threads && threads < MAX_BLOCK ? (unsigned)threads : MAX_BLOCK;
}

/* ---- PTX ---- */

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

/* What `.maxntid 128, 1, 1` between the parameters and the body allows. */
static unsigned max_threads(const char *p)
{
	const char *at = strstr(p, ".maxntid"), *body = strchr(p, '{');
	unsigned sides[3] = {0, 1, 1};

	if (at && (!body || at < body))
		sscanf(at + 8, "%u , %u , %u", &sides[0], &sides[1], &sides[2]);
	return block_of(sides);
}

/* `.version 8.7 .target sm_90`, which is how a module has to begin. */
static CUresult read_head(const char *text, int *arch)
{
	int major, minor, used = 0;

	if (sscanf(text, " .version %d.%d%n", &major, &minor, &used) != 2)
		return CUDA_ERROR_INVALID_PTX;
	if (major * 100 + minor > NEWEST_PTX)
		return CUDA_ERROR_UNSUPPORTED_PTX_VERSION;
	if (sscanf(text + used, " .target sm_%d", arch) != 1 || *arch > DEVICE_ARCH)
		return CUDA_ERROR_INVALID_PTX;
	return CUDA_SUCCESS;
}

static CUresult read_entries(const char *text, struct CUfunc_st **functions)
{
	int arch;
	CUresult result = read_head(text, &arch);

	for (const char *p = text; result == CUDA_SUCCESS && (p = strstr(p, ".entry")); p++) {
		const char *name = skip_space(p + 6);
		size_t length = identifier_length(name);
		struct CUfunc_st *function;

		if (name == p + 6 || !length)
			continue;
		function = function_new(name, length);
		if (!function)
			return CUDA_ERROR_OUT_OF_MEMORY;
		function->timed = begins_with_duration(name + length);
		function->max_threads = max_threads(name + length);
		function->registers = JIT_REGISTERS;
		function->ptx_arch = arch;
		function->next = *functions;
		*functions = function;
	}
	return result;
}

static CUresult read_ptx(const char *image, struct CUfunc_st **functions)
{
	char *text = without_comments(image);
	CUresult result = text ? read_entries(text, functions) : CUDA_ERROR_OUT_OF_MEMORY;

	free(text);
	return result;
}

/* ---- cubin ---- */

struct cubin {
	const char *image;
	const Elf64_Ehdr *head;
	const Elf64_Shdr *sections;
};

static const void *content(const struct cubin *cubin, const Elf64_Shdr *section)
{
	return cubin->image + section->sh_offset;
}

/* The section PREFIX KERNEL, or NULL. */
static const Elf64_Shdr *section_of(const struct cubin *cubin, const char *prefix, const char *kernel)
{
	const char *names = content(cubin, &cubin->sections[cubin->head->e_shstrndx]);
	size_t length = strlen(prefix);

	for (int i = 1; i < cubin->head->e_shnum; i++) {
		const char *name = names + cubin->sections[i].sh_name;

		if (strncmp(name, prefix, length) == 0 && strcmp(name + length, kernel) == 0)
			return &cubin->sections[i];
	}
	return NULL;
}

/* The value that the section of attributes has under `key`, if its first word is `only` (any: NULL). */
static const uint32_t *info(const struct cubin *cubin, const Elf64_Shdr *section, unsigned key, const uint32_t *only)
{
	const unsigned char *at = section ? content(cubin, section) : NULL,
			    *end = at + (section ? section->sh_size : 0);

	while (at && at + 4 <= end) {
		const uint32_t *words = (const uint32_t *)(at + 4);

		if (at[0] == INFO_SIZED && at[1] == key && (!only || words[0] == *only))
			return words;
		at += 4 + (at[0] == INFO_SIZED ? at[2] | (unsigned)at[3] << 8 : 0);
	}
	return NULL;
}

static CUresult read_kernel(const struct cubin *cubin, const char *name, uint32_t symbol, struct CUfunc_st **functions)
{
	const Elf64_Shdr *shared = section_of(cubin, ".nv.shared.", name);
	const uint32_t *registers = info(cubin, section_of(cubin, ".nv.info", ""), INFO_REGISTERS, &symbol);
	const uint32_t *sides = info(cubin, section_of(cubin, ".nv.info.", name), INFO_MAX_THREADS, NULL);
	struct CUfunc_st *function;

	if (!section_of(cubin, ".text.", name))
		return CUDA_ERROR_INVALID_IMAGE;
	function = function_new(name, strlen(name));
	if (!function)
		return CUDA_ERROR_OUT_OF_MEMORY;
	function->registers = registers ? (int)registers[1] : 0;
	function->shared_bytes = shared ? (unsigned)shared->sh_size : 0;
	if (function->shared_bytes >= RESERVED_SHARED_BYTES && section_of(cubin, ".nv.shared.reserved.", "0"))
		function->shared_bytes -= RESERVED_SHARED_BYTES;
	if (sides)
		function->max_threads = block_of(sides);
	function->ptx_arch = DEVICE_ARCH;
	function->next = *functions;
	*functions = function;
	return CUDA_SUCCESS;
}

/* As of the device's major architecture, and no newer than the device. */
static CUresult check_cubin(const Elf64_Ehdr *head)
{
	unsigned arch;

	if (head->e_ident[EI_CLASS] != ELFCLASS64 || head->e_machine != ELF_CUDA || head->e_type != ET_EXEC ||
	    head->e_shentsize != sizeof(Elf64_Shdr) || head->e_shstrndx >= head->e_shnum)
		return CUDA_ERROR_INVALID_IMAGE;
	if (head->e_ident[EI_OSABI] == OSABI_CUDA)
		arch = head->e_flags & 0xff;
	else if (head->e_ident[EI_OSABI] == OSABI_CUDA_13)
		arch = head->e_flags >> 8 & 0xff;
	else
		return CUDA_ERROR_INVALID_IMAGE;
	return arch / 10 == DEVICE_ARCH / 10 && arch <= DEVICE_ARCH ? CUDA_SUCCESS : CUDA_ERROR_NO_BINARY_FOR_GPU;
}

static CUresult read_cubin(const char *image, struct CUfunc_st **functions)
{
	struct cubin cubin = {image, (const Elf64_Ehdr *)image, NULL};
	CUresult result = check_cubin(cubin.head);

	if (result != CUDA_SUCCESS)
		return result;
	cubin.sections = (const Elf64_Shdr *)(image + cubin.head->e_shoff);
	for (int i = 1; i < cubin.head->e_shnum; i++) {
		const Elf64_Shdr *section = &cubin.sections[i];
		const Elf64_Sym *symbols = content(&cubin, section);
		const char *names;

		if (section->sh_type != SHT_SYMTAB || section->sh_link >= cubin.head->e_shnum)
			continue;
		names = content(&cubin, &cubin.sections[section->sh_link]);
		for (size_t n = 0; n < section->sh_size / sizeof(*symbols) && result == CUDA_SUCCESS; n++)
			if (ELF64_ST_TYPE(symbols[n].st_info) == STT_FUNC && symbols[n].st_other & OTHER_KERNEL)
				result = read_kernel(&cubin, names + symbols[n].st_name, (uint32_t)n, functions);
	}
	return result;
}

/* ---- either ---- */

CUresult image_read(const void *image, struct CUfunc_st **functions)
{
	CUresult result;

	*functions = NULL;
	if (strncmp(image, ELFMAG, SELFMAG) == 0)
		result = read_cubin(image, functions);
	else if (strncmp(image, FATBIN_MAGIC, 4) == 0 || strncmp(image, FATBIN_WRAPPER_MAGIC, 4) == 0)
		result = CUDA_ERROR_NOT_SUPPORTED;
	else
		result = is_text(image) ? read_ptx(image, functions) : CUDA_ERROR_INVALID_IMAGE;
	if (result != CUDA_SUCCESS) {
		functions_free(*functions);
		*functions = NULL;
	}
	return result;
}
