/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The model of the GPUs: a discrete-event simulation without I/O and without a clock of its own.
 *
 * Time only moves forward, by model_advance. A kernel's blocks go into slots of SMs, and an SM works on the block that
 * came first. Contexts that do not share (no MPS) take time slices; at the end of one what runs is stopped, and goes on
 * in the next. The sum of the processes' SM time is the device's, exactly.
 */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "../protocol.h"
#include "config.h"

struct op;
struct stream;
struct context;
struct model;

/* What one process did on one device; outlives the process. */
struct record {
	struct truth_entry truth;
	uint32_t held; /* SMs now */
	uint32_t sms; /* of the device */
	uint32_t uses; /* contexts that count into it */
	uint64_t since_ns; /* when held last changed */
	uint64_t sm_ns; /* ∫ held */
	uint64_t sampled_busy_ns; /* busy_ns at the last sample */
};

struct model_events { /* called while time advances */
	void (*completed)(void *owner, uint32_t stream, uint64_t sequence);
	void (*mark)(void *owner, uint32_t mark, uint64_t at_ns);
};

/* As many devices as config->gpus says, each whole. */
struct model *model_new(const struct config *config, const struct model_events *events);
/* One more device (an instance of a GPU), idle and empty; MAX_DEVICES at most. */
unsigned device_add(struct model *model, unsigned sms, uint64_t memory_bytes);
unsigned device_count(const struct model *model);
unsigned device_sms(const struct model *model, unsigned device);
/* No context is there, nor anything left of one. */
bool device_idle(const struct model *model, unsigned device);
void model_free(struct model *model);

/* Earliest thing to happen; UINT64_MAX: nothing. */
uint64_t model_next(const struct model *model);
/* Lets the next event happen if it is due by `to`; false when there was none. */
bool model_step(struct model *model, uint64_t to);
/* Lets everything up to `to` happen. */
void model_advance(struct model *model, uint64_t to);
uint64_t model_now(const struct model *model);

/* mps: shares SMs with the other MPS contexts, and may have blocks on so many percent of them at once. Priority 0 is
 * served before 1 where the configuration says that it counts.
 */
struct context *context_new(struct model *model, unsigned device, void *owner, struct record *record, bool mps,
			    unsigned percentage, int priority);
/* Queued work vanishes and is reported as completed; blocks that are on SMs finish, in the turns of their group. */
void context_end(struct context *context);
/* priority: as CUDA has it, 0 (least) to -5 */
struct stream *stream_new(struct context *context, uint32_t number, int priority);
/* Finishes what is queued, then is freed. */
void stream_end(struct stream *stream);
struct context *stream_context(const struct stream *stream);
/* Operations submitted and not completed. */
uint32_t context_queued(const struct context *context);
void stream_submit(struct stream *stream, const struct command *command, struct stream *awaited);

bool memory_take(struct model *model, unsigned device, uint64_t bytes);
void memory_give(struct model *model, unsigned device, uint64_t bytes);

/* Brings the counters up to now and returns them. */
const struct record *record_read(struct model *model, struct record *record);
void device_read(struct model *model, unsigned device, struct device_state *state);
struct record *record_new(struct model *model, unsigned device, uint32_t pid, bool mps, const char *command);
struct record **records(struct model *model, size_t *count);
void record_dead(struct record *record);
