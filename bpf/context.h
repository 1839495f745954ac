/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Which device a thread works on: contexts by ordinal, the current one per thread as a stack; ordinals by UUID. */
#pragma once
#include "abi.h"

/* In the place of a primary context's handle that is not known: whose memory is that of green contexts. */
#define GREEN_MEMORY(device) (~(__u64)(device))

#define CONTEXT_DEPTH 8 /* what lies deeper is DEVICE_UNKNOWN while it is on top */

enum context_shape {
	CONTEXT_RETAIN = 1, /* (out context, device) */
	CONTEXT_CREATE_3, /* (out context, flags, device): becomes current */
	CONTEXT_CREATE_5, /* cuCtxCreate_v3: device is the fifth */
	CONTEXT_CREATE_4, /* cuCtxCreate_v4 */
	CONTEXT_SET, /* (context) */
	CONTEXT_PUSH,
	CONTEXT_POP,
	CONTEXT_DESTROY, /* (context) */
	CONTEXT_RELEASE, /* (device): the last one destroys the primary context */
	CONTEXT_RESET, /* (device) */
	CONTEXT_UUID, /* (out uuid, device) */
	CONTEXT_UUID_2, /* the same, and right for MIG instances */
	CONTEXT_GREEN, /* (out green context, description, device): retains the device's primary context */
	CONTEXT_FROM_GREEN, /* (out context, green context) */
	CONTEXT_GREEN_DESTROY, /* (green context) */
	CONTEXT_BUS_ID, /* (out device, const char *): the device that is there on the PCI bus */
};

/* `context` is a CUcontext or a CUgreenCtx; a device's ordinal instead finds its primary context. */
struct context_key {
	struct process_id process;
	__u64 context;
};

struct context {
	/* Of an ordinal: its primary context's handle, 0 while only green contexts retain it. Of a green one: whose memory it is. */
	__u64 primary;
	__u32 device;
	__u32 users; /* of a primary context: how often it was retained and not released */
};

struct current {
	__u64 context;
	__u32 device;
	__u32 _pad;
};

struct context_stack {
	__u32 depth; /* may be more than are kept */
	__u32 _pad;
	struct current entries[CONTEXT_DEPTH];
};

struct ordinal_key {
	struct process_id process;
	__u32 ordinal;
};

struct uuid {
	__u8 bytes[16];
};

/* As the program wrote it: [domain:]bus:device[.function]; cut where it is longer than any. */
struct bus_id {
	char text[24];
};
