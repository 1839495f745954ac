/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The library's connection to the server, and what every call has to check before it asks anything: is NVML
 * initialised, is the handle one of ours, is the GPU still there, is the function switched off for a test.
 */
#pragma once

#include <stddef.h>

#include "../protocol.h"
#include "nvml.h"

/* Asks the server; on NVML_SUCCESS the caller frees `*items`. DRIVER_NOT_LOADED when the server is gone. */
nvmlReturn_t session_ask(const struct query *query, struct answer *answer, void **items);

/* Asks for exactly one item of `bytes`. */
nvmlReturn_t session_ask_one(const struct query *query, void *item, size_t bytes);

/* Checks that concern no device. `function` is the exported name. */
nvmlReturn_t session_enter(const char *function);

/*
 * Checks the handle too, and gives the device's index and present state (either may be NULL). A handle of an instance
 * that is gone is NOT_FOUND.
 */
nvmlReturn_t session_enter_device(const char *function, nvmlDevice_t device, unsigned *index,
				  struct device_state *state);

/* The same for what is answered about whole GPUs only. */
nvmlReturn_t session_enter_gpu(const char *function, nvmlDevice_t device, unsigned *index, struct device_state *state);

nvmlReturn_t session_state(unsigned index, struct device_state *state);

/* GPUs; their instances have the indices behind them, up to session_total_count(). */
unsigned session_device_count(void);
unsigned session_total_count(void);

/* What does not change about a device. The index has been checked. */
const struct device_facts *session_facts(unsigned index);

nvmlDevice_t session_handle(unsigned index);

/* Puts a result where the caller wants it; INVALID_ARGUMENT for nowhere, INSUFFICIENT_SIZE for too little room. */
nvmlReturn_t give(unsigned value, unsigned *to);
nvmlReturn_t give_text(const char *text, char *buffer, unsigned length);

/* Leaves the calling function with the error, if `call` is one. */
#define TRY(call)                                                                                                      \
	do {                                                                                                           \
		nvmlReturn_t try_result = (call);                                                                      \
		if (try_result != NVML_SUCCESS)                                                                        \
			return try_result;                                                                             \
	} while (0)

/* How most calls about one device begin. */
#define ENTER_DEVICE(device, index, state) TRY(session_enter_device(__func__, device, index, state))
#define ENTER_GPU(device, index, state) TRY(session_enter_gpu(__func__, device, index, state))
