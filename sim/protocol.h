/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Everything that the server of the simulated GPU and its clients agree on.
 *
 * A client connects to $GPUSIM_DIR/gpusim.sock (SOCK_STREAM) and sends a struct hello. A query client then sends struct
 * query and reads struct answer + items, as often as it likes. A CUDA client gets a struct welcome with two descriptors:
 * a memfd that holds its struct shared, and an eventfd, the doorbell.
 *
 * No lock is shared. The client alone writes `head`, commands and `waiters`; the server alone writes `tail`, `progress`,
 * `completed`, `marks` and replies. The server never waits for a client; a client waits on the futex `progress`.
 */
#pragma once
#include <stdint.h>

#define GPUSIM_VERSION 4u
#define GPUSIM_MAGIC 0x4d495347u
#define GPUSIM_DEFAULT_DIR "/run/gpusim"
#define GPUSIM_SOCKET "gpusim.sock"

#define MAX_GPUS 16
#define MAX_DEVICES 32 /* GPUs first, then every MIG instance that there has ever been */
#define MAX_INSTANCES 7 /* of one GPU */
#define MAX_STREAMS 1024 /* of one client, on all devices together */
#define MAX_MARKS 4096
#define MAX_REPLIES 64
#define RING_COMMANDS 8192
#define QUEUE_DEPTH 1022 /* operations that one stream holds before a launch blocks, as on the real driver */

enum hello_kind { HELLO_CUDA = 1, HELLO_QUERY, HELLO_NVML /* a query client that needs the driver */ };
enum graphics { GRAPHICS_NONE, GRAPHICS_ONLY, GRAPHICS_TOO /* and computes */ };

struct hello {
	uint32_t magic, version, kind;
	uint32_t mps; /* CUDA: the control pipe of an MPS daemon is where the environment says */
	int32_t mps_percentage; /* CUDA_MPS_ACTIVE_THREAD_PERCENTAGE; 0: not set */
	int32_t mps_priority; /* CUDA_MPS_CLIENT_PRIORITY: 0 normal, 1 below normal; -1: not set */
	uint32_t graphics, _pad; /* GPUSIM_GRAPHICS */
	uint64_t mps_pinned_bytes[MAX_DEVICES]; /* CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; 0: not set */
};

struct device_facts {
	uint32_t index, sms;
	uint64_t memory_bytes, copy_bytes_per_second;
	uint32_t mig_mode; /* of a GPU: it is split, and only its instances can be used */
	uint32_t is_instance, present; /* 0: an instance that there was */
	uint32_t gpu; /* index of the GPU that this is, or is a part of */
	uint32_t position; /* of an instance: NVML's index of it */
	uint32_t gpu_instance, compute_instance, slices;
	char uuid[48]; /* "GPU-…", "MIG-…" */
	char name[64];
	char pci_bus_id[32]; /* "00000000:01:00.0" */
};

struct welcome {
	uint32_t magic, devices;
	uint64_t launch_ns; /* that a launch takes of the calling thread's time */
	struct device_facts facts[MAX_DEVICES];
};

enum command_kind {
	CMD_KERNEL =
		1, /* a = blocks, b = threads per block, c = ns per block, d = 1 for the first kernel of an API call */
	CMD_COPY, /* a = enum copy_kind, b = bytes */
	CMD_MARK, /* a = mark: gets the time at which the stream reached it */
	CMD_WAIT, /* a = other stream, b = its sequence to wait for */
	CMD_STREAM_NEW, /* stream, device; a = priority */
	CMD_STREAM_END,
	/* answered in replies[reply]: */
	CMD_CONTEXT_NEW, /* on `device`; result */
	CMD_CONTEXT_END,
	CMD_ALLOC, /* a = bytes → values[0] = address */
	CMD_FREE, /* a = address → values[0] = bytes */
	CMD_MEMORY_INFO, /* → values = free, total */
	CMD_IPC_EXPORT, /* a = address: other processes may open it from now on */
	CMD_IPC_OPEN, /* a = address of another process */
	CMD_IPC_CLOSE, /* a = address */
};

enum copy_kind { COPY_H2D, COPY_D2H, COPY_D2D, COPY_SET, COPY_PEER /* c = to, d = from: devices */ };

struct command {
	uint32_t kind, device;
	uint32_t stream, reply;
	uint64_t sequence; /* of the stream; completed[stream] reaches it when this is done */
	uint64_t at_ns; /* CLOCK_MONOTONIC of the call */
	uint64_t a, b, c, d;
};

struct reply {
	_Atomic uint32_t done; /* the client clears it before it asks, the server sets it to 1 */
	int32_t result; /* a CUresult */
	uint64_t values[2];
};

struct shared {
	_Atomic uint64_t head; /* commands ever written */
	uint64_t _pad0[7];
	_Atomic uint64_t tail; /* commands ever taken */
	_Atomic uint32_t progress; /* futex: changes whenever anything below does while a thread waits */
	_Atomic uint32_t gone; /* a CUresult: every call fails with it, the server serves this client no more */
	_Atomic uint32_t leaving; /* by the client: its process ends by exit() */
	uint32_t _pad1[11];
	_Atomic uint32_t waiters; /* threads in, or about to enter, a futex wait */
	/* A lock from outside (cuCheckpointProcessLock): the server writes `locked`, the client the other two. A thread that
	 * adds to `calls` and then finds `locked` set takes itself back, rings the doorbell and waits. */
	_Atomic uint32_t locked;
	_Atomic uint32_t calls; /* threads in a call that changes something on the device */
	_Atomic uint32_t host_calls; /* host functions that were asked for and have not returned */
	uint32_t _pad2[12];
	struct reply replies[MAX_REPLIES];
	_Atomic uint64_t completed[MAX_STREAMS];
	_Atomic uint64_t marks[MAX_MARKS]; /* ns; 0 while not reached */
	struct command ring[RING_COMMANDS];
};

/* ---- query port ---- */

enum query_op {
	Q_DEVICES = 1, /* → device_facts */
	Q_DEVICE_STATE, /* device → device_state */
	Q_PROCESSES, /* device → process_entry */
	Q_PROCESS_SAMPLES, /* device, a = since (wall µs) → util_sample */
	Q_DEVICE_SAMPLES, /* device, a = since (wall µs) → util_sample with pid 0 */
	Q_XIDS, /* a = after this sequence → xid_event */
	Q_FAULT, /* text: lose, restore, drop-samples (a = how many), xid (a = number, b = pid), unsupported, supported
		    (name = NVML function), driver-unload, driver-load, mig (name = profiles, or off), checkpoint-fails
		    (a = pid) */
	Q_UNSUPPORTED, /* name → count 1 if the NVML function is switched to NOT_SUPPORTED */
	Q_TRUTH, /* → truth_entry */
	Q_MPS_STATUS, /* → mps_status */
	Q_MPS_START,
	Q_MPS_QUIT,
	Q_MPS_SET, /* text: server (a = 1, 0), default-percentage, percentage (a, thousandths), default-priority (a),
		      default-memory, memory (a, b = device) */
	Q_MPS_CLIENTS, /* → mps_client */
	Q_MPS_TERMINATE, /* a = client id */
	Q_CHECKPOINT, /* a = pid, b = enum checkpoint_op, c = ms, 0: no limit (lock) → checkpoint_reply, when it is done */
};

enum checkpoint_op {
	CHECKPOINT_STATE = 1,
	CHECKPOINT_THREAD,
	CHECKPOINT_LOCK,
	CHECKPOINT_SAVE,
	CHECKPOINT_RESTORE,
	CHECKPOINT_UNLOCK
};

enum checkpoint_state { STATE_RUNNING, STATE_LOCKED, STATE_CHECKPOINTED, STATE_FAILED };

struct checkpoint_reply {
	int32_t result; /* a CUresult */
	uint32_t value; /* state or thread */
};

struct query {
	uint32_t op, device;
	uint64_t a, b, c;
	char text[32];
	char name[96];
};

struct answer {
	uint32_t status; /* 0, or an errno */
	uint32_t count, item_bytes, _pad;
};

struct device_state {
	uint64_t at_ns, wall_us;
	uint64_t sm_active_ns; /* ∫ busy SMs ÷ SMs */
	uint64_t busy_ns; /* time with at least one busy SM */
	uint64_t tx_bytes, rx_bytes; /* what leaves the device and what comes in: host or another device */
	uint64_t dram_bytes, dram_bytes_per_second; /* read and written by copies and memset; kernels are not known */
	uint64_t memory_used, memory_reserved;
	uint32_t sm_clock_mhz, power_mw, power_limit_mw, temperature_c;
	uint32_t lost, mps;
	uint32_t generation; /* changes with the facts */
	uint32_t old_process_utilization;
};

struct process_entry {
	uint32_t pid, mps;
	uint32_t graphics, device; /* of a GPU in MIG mode: the instance */
	uint64_t used_bytes;
};

struct util_sample {
	uint64_t at_us; /* CLOCK_REALTIME */
	uint32_t pid, percent;
};

struct xid_event {
	uint64_t sequence;
	uint32_t device, xid, pid, _pad;
};

struct truth_entry { /* one process on one device */
	uint32_t pid, device;
	uint32_t alive, mps;
	uint64_t launches, kernels, allocations;
	uint64_t sm_ns; /* ∫ its SMs ÷ SMs of the device */
	uint64_t busy_ns;
	uint64_t tx_bytes, rx_bytes, memory_bytes; /* device → host, host → device */
	uint64_t peer_tx_bytes, peer_rx_bytes; /* to and from another device */
	uint64_t queued_ns, queued_max_ns; /* Σ and most, from launch to first block */
	char command[16];
};

struct mps_status {
	uint32_t running, started, ready, server_pid; /* the daemon; its server */
	uint32_t default_percentage, percentage; /* of later servers, of later clients of this one; in thousandths */
	int32_t default_priority;
	uint32_t clients;
	uint64_t default_memory[MAX_DEVICES], memory[MAX_DEVICES]; /* 0: no limit */
};

struct mps_client {
	uint32_t id, pid, device, percentage;
};
