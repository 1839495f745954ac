/* SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* Tenants: what one may still put into the maps, and what it lost because that was used up. */
#pragma once
#include "abi.h"

#define TENANT_OTHERS 0ull /* who is in no cgroup of its own, or for whom there is no entry */

struct tenant {
	__s64 credit[LOST_REASONS]; /* written by the agent; in `newcomer`: at the start, 0: not bounded */
};

/* Apart, for the agent never writes it. */
struct tenant_loss {
	__u64 lost[LOST_REASONS];
};
