/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Where cuGetProcAddress finds each call. A file of its own: its addresses are those of the exports, in entries.S. */
#include "internal.h"

#include "exact_names.h"

#define ADDRESS(export) address_of_##export __asm__(#export)
#define E(name, version, export) ADDRESS(export)
#define P(name, version, export, twin) ADDRESS(export), ADDRESS(twin)
/* As symbols without prototypes: only their addresses matter here. */
extern __attribute__((visibility("default"))) const char
#include "exports.h"
#include "unmodelled.h"
	end_of_exports;
#undef E
#undef P

#define E(name, version, export) P(name, version, export, export)
#define P(name, version, export, twin)                                                                                 \
	{                                                                                                              \
		name, version, (void *)&address_of_##export, (void *)&address_of_##twin                                \
	}
const struct export exports[] = {
#include "exports.h"
#include "unmodelled.h"
	{NULL, 0, NULL, NULL}};
