// SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
// SPDX-FileCopyrightText: The GPU Warden authors
/* What function handles are called, as the program asks the driver for them. */
#pragma once
#include "process.bpf.h"

enum name_shape {
	NAME_GET = 1, /* cuModuleGetFunction, cuLibraryGetKernel (out handle, module, name) */
	NAME_OF_KERNEL, /* cuKernelGetFunction (out function, kernel) */
	NAME_QUERIED, /* cuFuncGetName, cuKernelGetName (out name, handle) */
};

PROBE("uprobe", name_enter)
{
	__u64 cookie = bpf_get_attach_cookie(ctx);
	struct process_id id = this_process();
	struct arguments arguments = read_arguments(ctx);
	struct call call = {.a = arguments.first, .b = arguments.second, .c = arguments.third, .cookie = cookie};

	if (!begin_call(ctx, cookie, &id))
		return 0;
	keep_call(CALL_NAME, &call);
	return 0;
}

/* Only as much of the record as its text needs: a program may ask for 10,000 names in a moment. */
static __always_inline void post_name(const struct name *name, __u32 length)
{
	if (length > sizeof(name->text))
		length = sizeof(name->text);
	if (bpf_ringbuf_output(&names, (void *)name, offsetof(struct name, text) + length, 0))
		count_lost(LOST_NAME);
}

PROBE("uretprobe", name_return)
{
	struct name name = {};
	struct call call;
	long length = 0;
	__u32 shape;

	if (!take_call(CALL_NAME, &call) || !succeeded(ctx) || !take_credit(LOST_NAME))
		return 0;
	shape = COOKIE_SHAPE(call.cookie);
	name.process = this_process();
	name.kind = shape == NAME_OF_KERNEL ? NAME_ALIAS : NAME_FUNCTION;
	name.function = shape == NAME_QUERIED ? call.b : read_result(call.a);
	if (shape == NAME_OF_KERNEL)
		name.other = call.b;
	else
		length = bpf_probe_read_user_str(name.text, sizeof(name.text),
						 (void *)(shape == NAME_QUERIED ? read_result(call.a) : call.c));
	if (length < 0) {
		count_lost(LOST_USER_READ);
		return 0;
	}
	name.length = length;
	post_name(&name, length);
	return 0;
}
