/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/* The server's parts: connections, the clients' rings, the query port. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "config.h"
#include "model.h"

#define MOST_FAULTS 32
#define SAMPLES 65536 /* of one device: 60 s of many processes */
#define XIDS 256
/* What of a client is ready: the low bits of epoll's pointer. */
#define OF_SOCKET 0u
#define OF_PROCESS 1u
#define OF_DOORBELL 2u
#define OF_MASK 3u

struct allocation {
	uint64_t address, bytes;
	uint32_t device;
	bool exported; /* to other processes */
};

/* A change of state of a process that another process asked for (cuCheckpointProcess…). */
struct transition {
	enum checkpoint_op op; /* 0: none */
	uint32_t caller; /* client id: may be gone by now */
	uint64_t deadline_ns, done_ns;
};

/* What a query client asked about another process, while it has no answer. */
struct question {
	enum checkpoint_op op; /* 0: none */
	bool begun;
	uint32_t pid;
	uint64_t deadline_ns;
};

struct client {
	struct client *next;
	int socket, pid_fd, doorbell;
	uint32_t kind; /* 0: no hello yet */
	uint32_t pid, id, uid;
	bool mps, dirty, doomed;
	bool broken; /* an MPS client that another one took along: it is not served any more */
	uint64_t terminate_at_ns, terminated_ns; /* by the MPS daemon; 0: not */
	struct hello hello;
	char command[16];
	/* input and output of the socket */
	char input[512];
	size_t input_length;
	char *output;
	size_t output_length, output_sent;
	/* CUDA */
	struct shared *shared;
	uint64_t tail, seen; /* commands taken, and published when this round began */
	struct context *contexts[MAX_DEVICES];
	struct record *records[MAX_DEVICES];
	unsigned percentage;
	int priority;
	uint64_t memory_limit[MAX_DEVICES];
	struct stream *streams[MAX_STREAMS];
	struct allocation *allocations;
	size_t allocation_count, allocation_room;
	/* checkpoint.c */
	struct question question;
	struct transition transition;
	enum checkpoint_state state;
	bool swapped; /* its memory is not on the devices */
	bool checkpoint_fails;
	bool restore_failed; /* for want of room: it is never restored again */
	uint32_t opened; /* memory of other processes */
};

#define ALL_SMS 100000 /* in thousandths of a percent */

struct mps {
	bool running, started; /* the daemon; its server, which the first client has started too */
	int server; /* its pid; 0: none */
	uint64_t ready_ns; /* when it is */
	uint32_t default_percentage, percentage; /* in thousandths */
	int32_t default_priority;
	uint64_t default_memory[MAX_DEVICES], memory[MAX_DEVICES];
};

struct samples {
	struct util_sample ring[SAMPLES];
	uint64_t count;
};

struct node {
	struct config config;
	struct model *model;
	struct client *clients;
	struct mps mps;
	struct device_facts facts[MAX_DEVICES];
	uint32_t generation; /* of the facts */
	bool unloaded; /* the driver */
	bool lost[MAX_GPUS];
	uint64_t drop_samples;
	char unsupported[MOST_FAULTS][96];
	size_t unsupported_count;
	struct xid_event xids[XIDS];
	uint64_t xid_count;
	struct samples process_samples[MAX_DEVICES], device_samples[MAX_DEVICES];
	uint64_t sampled_ns, device_sampled_busy_ns[MAX_DEVICES];
	uint64_t random; /* of samples; never 0 */
	double load[MAX_DEVICES]; /* of the last sample, for clocks and power */
	uint64_t next_address;
	uint32_t next_id;
	int epoll, timer, listener;
};

uint64_t clock_ns(void);

/* clients.c: the CUDA side */
bool client_begin_cuda(struct node *node, struct client *client);
void client_end_cuda(struct node *node, struct client *client);
/* Takes all commands of all clients in the order of their time, and lets what falls between them happen. */
void clients_run(struct node *node, uint64_t to);
bool clients_idle(const struct node *node);
void clients_wake(struct node *node);
extern const struct model_events CLIENT_EVENTS;

/* main.c */
void client_send(struct node *node, struct client *client);
/* Closes what epoll watches; -1: nothing. */
void close_watched(const struct node *node, int fd);

/* checkpoint.c: the answer comes when checkpoints_run has it */
void checkpoint_ask(struct node *node, struct client *client, const struct query *query);
void checkpoints_run(struct node *node, uint64_t now_ns);
/* When to look again; UINT64_MAX: nothing is under way. */
uint64_t checkpoints_next(const struct node *node, uint64_t now_ns);
uint32_t checkpoint_fault(struct node *node, uint32_t pid);

/* query.c */
void query_reply(struct client *client, uint32_t status, const void *items, size_t count, size_t item_bytes);
void query_answer(struct node *node, struct client *client, const struct query *query);

/* mps.c */
#define MPS_SERVER_NAME "nvidia-cuda-mps-server"
void mps_answer(struct node *node, struct client *client, const struct query *query);
void mps_reset(struct node *node, bool running);
/* The server's, or where there is none that of this process. */
uint32_t mps_server_pid(const struct node *node);
/* Whether this newcomer is to be served later, as the server is still starting. */
bool mps_makes_wait(struct node *node, const struct hello *hello);
/* Before its contexts end. */
void mps_client_ends(struct node *node, struct client *client);
void mps_run(struct node *node, uint64_t now_ns);
/* When to look again; UINT64_MAX: nothing is under way. */
uint64_t mps_next(const struct node *node, uint64_t now_ns);
void mps_end(struct node *node);

/* mig.c: 0 or an errno; EBUSY while anything runs on the GPU or its instances */
uint32_t mig_split(struct node *node, unsigned gpu, bool mode, const struct mig_profile profiles[MAX_INSTANCES]);
void mig_sum(const struct node *node, unsigned gpu, struct device_state *state);
void device_state_of(const struct node *node, unsigned device, struct device_state *state);

/* samples.c: every 0.2 s, what NVML would have sampled */
void samples_take(struct node *node, uint64_t now_ns);
void samples_forget(struct node *node);

/* cli.c */
int cli(int argc, char **argv);
int cli_connect(const char *dir, uint32_t kind);
