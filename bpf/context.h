/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Which device a thread launches on: contexts by ordinal, the current one per thread as a small stack. */
#pragma once
#include "abi.h"

#define CONTEXT_DEPTH 8

enum context_shape {
	CONTEXT_RETAIN = 1, /* (out context, device) */
	CONTEXT_CREATE_3, /* (out context, flags, device): becomes current */
	CONTEXT_CREATE_5, /* cuCtxCreate_v3: device is the fifth */
	CONTEXT_CREATE_4, /* cuCtxCreate_v4 */
	CONTEXT_SET, /* (context) */
	CONTEXT_PUSH,
	CONTEXT_POP,
};

struct context_key {
	struct process_id process;
	__u64 context;
};

struct context_stack {
	__u32 depth;
	__u32 devices[CONTEXT_DEPTH];
};
