/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* What the model's two files share: its structures, and what each calls of the other. */
#pragma once
#include "model.h"

#define NEVER UINT64_MAX
#define BLOCKS_PER_SM 32

struct op {
	struct op *next; /* in its stream */
	struct op *ready_next, *ready_previous; /* in its device's ready list */
	struct stream *stream;
	struct stream *awaited;
	struct command command;
	uint64_t block_ns, blocks_left; /* of work on SMs; left: not yet on one */
	uint32_t threads; /* of a block */
	uint32_t per_sm; /* blocks on each SM when it is alone: its block time is meant for so many */
	uint32_t placed; /* parts of it that SMs hold */
	bool ready, started;
	double copy_end_bytes; /* it ends when each copy on its link has had so many */
};

struct stream {
	struct stream *next; /* in its context */
	struct context *context;
	struct op *first, *last;
	uint64_t completed;
	uint32_t number;
	uint32_t awaiters; /* operations anywhere that wait for this stream */
	int urgency; /* less is served first */
	bool ended, blocked;
};

struct part { /* what is in a slot of an SM: a block, or short blocks that run one after another; or in a few slots */
	struct op *op;
	uint64_t ns; /* of the whole SM */
	uint32_t slots;
};

/* SMs that hold the same. An SM works on the part that came first; the others wait in their slots. */
struct sm_set {
	struct sm_set *next; /* in its group, by end */
	uint64_t end_ns; /* of the first part; while the group is preempted, its ns is what is left of it */
	uint32_t count, length;
	uint32_t slots, threads; /* taken */
	struct part parts[BLOCKS_PER_SM];
};

/* Contexts that run side by side: all MPS clients of a device, or one context alone. */
struct group {
	struct group *next_preempted;
	struct sm_set *busy;
	uint64_t last_active_ns;
	uint32_t idle_sms, contexts;
};

struct context {
	struct context *next; /* in its device */
	struct device *device;
	struct group *group;
	struct stream *streams;
	struct record *record;
	void *owner; /* NULL: ended */
	uint32_t cap, placed, copying;
	uint32_t queued; /* operations submitted and not completed */
	int priority;
};

struct engine { /* one direction of a link */
	struct op *running; /* the one that ends first, and so on by ready_next */
	uint32_t count; /* of them */
	struct op *first, *last; /* waiting, linked by ready_next */
	uint64_t since_ns;
	double served_bytes; /* each that runs has had since the beginning, up to since_ns */
};

struct device {
	struct model *model;
	unsigned index, sms;
	uint64_t memory_bytes, dram_bytes_per_second;
	struct context *contexts;
	struct group shared; /* of the MPS clients */
	struct group *active, *preempted;
	uint64_t slice_end_ns;
	bool switching, contended; /* contended: another group waits for its turn */
	uint32_t free_sms;
	struct op *ready_first, *ready_last;
	struct engine engines[2]; /* COPY_H2D, COPY_D2H */
	uint64_t switched_ns; /* when the turn of the next group begins, while `switching` */
	uint64_t dram_bytes; /* of copies */
	uint64_t since_ns, sm_ns, busy_ns, tx_bytes, rx_bytes, memory_used;
};

struct model {
	struct config config;
	struct model_events events;
	uint64_t now_ns;
	int blocked; /* streams that wait for another one */
	unsigned device_count;
	struct device devices[MAX_DEVICES];
	struct record **records;
	size_t record_count, record_room;
};

/* model.c */
void *must(void *memory);
void record_update(struct record *record, uint64_t now_ns);
void device_update(struct device *device, uint64_t now_ns);

/* copies.c: those between host and device, or two devices */
void copy_begin(struct device *device, struct op *op, uint64_t now_ns);
/* Those of the context that wait for a link are none any more. */
void copies_forget(struct device *device, const struct context *context);
uint64_t copies_next(const struct device *device);
/* One that has ended by now, off its link; NULL: there is none. */
struct op *copy_take(struct device *device, uint64_t now_ns);

/* sms.c */
/* Copies within the device and memset are kernels too. */
bool on_sms(const struct command *command);
void shape_kernel(struct op *op, unsigned sms);
/* A large copy takes whole SMs, all of them: what it waits for is the memory. */
void shape_copy(struct op *op, const struct device *device);
void ready_add(struct device *device, struct op *op);
void ready_remove(struct device *device, struct op *op);
/* The context has so many SMs more, or less, that work for it. */
void hold(struct context *context, int64_t change, uint64_t now_ns);
/* SMs begin with the part that is now the first of theirs. */
void run_first(struct sm_set *set, uint64_t now_ns);
/* Gives SMs to ready kernels, and the turn to another group when it is time. */
void dispatch(struct device *device, uint64_t now_ns);
/* The group whose turn it is goes on where it was stopped. */
void resume(struct device *device, uint64_t now_ns);
