/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * What the files of the client library share. Exports are real functions with addresses of their own that call only
 * hidden functions: probes on them must see each call of a program exactly once.
 */
#pragma once
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "protocol.h"

#pragma GCC visibility push(default)
#include "cuda.h"
#pragma GCC visibility pop

/* no_icf: two exports with equal bodies must stay two addresses. */
#define API __attribute__((visibility("default"), noinline, no_icf)) CUresult
/* A function and its per-thread-default-stream twin. */
#define API2(plain, twin, parameters, call)                                                                            \
	API plain parameters                                                                                           \
	{                                                                                                              \
		return call;                                                                                           \
	}                                                                                                              \
	API twin parameters;                                                                                           \
	API twin parameters                                                                                            \
	{                                                                                                              \
		return call;                                                                                           \
	}

#define MAGIC_STREAM 0x5354524du
#define MAGIC_MODULE 0x4d4f444cu
#define MAGIC_FUNCTION 0x46554e43u
#define MAGIC_EVENT 0x45564e54u
#define MAGIC_GRAPH 0x47525048u
#define MAGIC_EXEC 0x45584543u
#define MAGIC_CONTEXT 0x43545854u
#define MAGIC_ARRAY 0x41525259u
#define MAGIC_MIPMAP 0x4d495050u
#define MAGIC_NODE 0x4e4f4445u
#define MAGIC_GREEN 0x4752454eu

/* ---- exports.c ---- */

/* A form of a call: the name that programs ask for, and the version of CUDA that brought the form. */
struct export
{
	const char *name;
	int version;
	void *plain, *per_thread;
};
extern const struct export exports[]; /* the last one has no name */

/* ---- connection.c ---- */

struct connection {
	int socket, doorbell;
	struct shared *shared;
	struct welcome welcome;
	int devices; /* visible */
	uint32_t visible[MAX_DEVICES]; /* ordinal → the server's index */
};
extern struct connection connection;

CUresult connection_open(void);
/* CUDA_SUCCESS while calls can work: initialised, not a fork()ed child, the server lives. */
CUresult ready(void);
CUresult ready_ordinal(CUdevice device);
const struct device_facts *facts_of(CUdevice device);
/* Asks the socket whether the server hung up; at most every 100 ms unless `now`. */
bool connection_alive(bool now);

/* ---- ring.c ---- */

/* A point in the work of a stream that stays meaningful when the stream is gone and its number used again. */
struct point {
	uint32_t stream;
	uint64_t generation, sequence;
};

uint64_t clock_ns(void);
/*
 * Around whatever changes something on the device, so that a lock from outside (cuCheckpointProcessLock) finds the call
 * whole or not begun. They nest. call_begin waits while the process is locked; where it fails there is no call_end.
 */
CUresult call_begin(void);
void call_end(void);
/* Waits while the process is locked: for calls that only look or wait. */
CUresult call_pass(void);
CUresult ring_request(uint32_t kind, uint32_t device, uint64_t a, uint64_t values[2]);
/* Appends an operation to the stream, after the waits that the legacy NULL stream's rules ask for. */
CUresult ring_operation(struct CUstream_st *stream, uint32_t kind, const uint64_t arguments[4], struct point *at);
CUresult ring_stream_new(struct CUctx_st *context, unsigned flags, int priority, struct CUstream_st **stream);
/* The number comes back into use when the stream is drained. Frees the handle. */
void ring_stream_end(struct CUstream_st *stream);
/* Drains and ends all streams of the context. */
void ring_streams_end(struct CUctx_st *context);
struct point ring_last(struct CUstream_st *stream);
size_t ring_points(struct CUctx_st *context, struct point *points, size_t room);
bool point_reached(struct point point);
CUresult point_wait(struct point point);
CUresult point_query(struct point point);

/* ---- context.c ---- */

struct CUctx_st {
	uint32_t magic;
	_Atomic bool alive;
	int ordinal;
	unsigned attached; /* beyond its maker */
	uint32_t device; /* the server's index */
	struct CUctx_st *primary; /* of a green context: the one that what it allocates belongs to */
	struct CUstream_st *null;
	struct CUstream_st *streams; /* all, the NULL stream too; ring lock */
};

CUresult context_current(struct CUctx_st **context);

/* ---- stream.c ---- */

struct CUstream_st {
	uint32_t magic, number;
	uint64_t generation, sequence;
	struct CUctx_st *context;
	struct CUstream_st *next;
	unsigned flags;
	int priority;
	uint64_t waits_for_null; /* sequence of the NULL stream that this one waits for already */
	uint64_t null_waits_for; /* sequence of this one that the NULL stream waits for already */
	struct CUgraph_st *capture; /* what follows is of this capture, and guarded by its lock */
	uint64_t capture_number, captured, joined; /* `joined` of its operations are awaited by another stream */
	bool capture_began_here, capture_is_ours;
	struct CUstream_st *next_capturing;
};

/* NULL and the special handles stand for the NULL stream of the current context. */
CUresult stream_resolve(CUstream handle, struct CUstream_st **stream);
/* The same for work that a capture cannot take. */
CUresult stream_for_work(CUstream handle, struct CUstream_st **stream);

/* ---- launch.c, host functions ---- */

CUresult host_wait(uint32_t stream);
bool host_pending(uint32_t stream);

/* ---- device.c ---- */

#define DEVICE_ARCH 90 /* compute capability 9.0 */
#define MAX_BLOCK 1024u
#define SHARED_BYTES 49152 /* of a block, unless the function asks for more */
#define SHARED_BYTES_OPTIN 232448
#define RESERVED_SHARED_BYTES 1024 /* of each block's, for the driver */

/* ---- module.c ---- */

#define PARAMETER_ROOM 4096

/* What the calls of before CUDA 4 set on a function, ahead of its launch. */
struct launch_state {
	unsigned block[3], shared_bytes;
	size_t parameter_bytes;
	char parameters[PARAMETER_ROOM];
};

struct CUfunc_st {
	uint32_t magic;
	bool timed; /* its first parameter is its duration */
	int registers, ptx_arch; /* 90: of compute_90 */
	unsigned max_threads; /* of a block */
	unsigned shared_bytes; /* that the image gives each block */
	unsigned dynamic_bytes; /* at most, of a launch; 0: what SHARED_BYTES leaves */
	char *name;
	struct launch_state *state; /* NULL until such a call is made */
	struct CUfunc_st *next;
};

struct kernel {
	uint64_t blocks, threads, block_ns;
};

/* ---- function.c ---- */

CUresult function_check(CUfunction function);
/* The most shared memory that a launch may ask for. */
unsigned dynamic_room(const struct CUfunc_st *function);

/* ---- image.c ---- */

/* The kernels of an image, or why it cannot be loaded. */
CUresult image_read(const void *image, struct CUfunc_st **functions);
void functions_free(struct CUfunc_st *function);

/* ---- launch.c ---- */

CUresult kernel_of(const CUDA_KERNEL_NODE_PARAMS *node, struct kernel *kernel);
CUresult kernel_submit(struct CUstream_st *stream, const struct kernel *kernel, bool first);
/* Launches now, or adds to the capture. */
CUresult kernel_launch(CUstream handle, const CUDA_KERNEL_NODE_PARAMS *params);

/* ---- copy.c ---- */

enum { NO_COPY = -1 }; /* host to host: not the device's business */

/* Copies now, or adds to the capture. */
CUresult copy_submit(int kind, size_t bytes, CUstream handle, bool wait);
/* Between memory of these devices, as the server numbers them; the same twice: on one. In a capture it counts as that. */
CUresult copy_between(uint32_t to, uint32_t from, size_t bytes, CUstream handle, bool wait);
int copy_direction(bool to_device, bool from_device);
int copy_direction_of(CUdeviceptr to, CUdeviceptr from);

/* ---- copy_shaped.c ---- */

CUresult copy_shape(const CUDA_MEMCPY3D *copy, int *kind, size_t *bytes);

/* ---- graph.c ---- */

CUresult graph_new(CUgraph *graph);
CUresult graph_append_kernel(CUgraph graph, const struct kernel *kernel, CUgraphNode *node);
CUresult graph_append_copy(CUgraph graph, int kind, size_t bytes, CUgraphNode *node);
/* Memory that the graph has when it runs, at an address that it has from now on. */
CUresult graph_append_allocation(CUgraph graph, CUmemLocation location, size_t bytes, CUdeviceptr *pointer,
				 CUgraphNode *node);
CUresult graph_append_free(CUgraph graph, CUdeviceptr pointer, CUgraphNode *node);
bool is_graph_address(CUdeviceptr pointer);
/* The node that was added last, 0 or 1; valid while the graph is. */
size_t graph_last(CUgraph graph, const CUgraphNode **nodes);
void graph_free(CUgraph graph);
/* The nodes that are appended next take the places of those that are there. */
void graph_begin_rewriting(CUgraph graph);
/* False: nodes are left that nothing took the place of. */
bool graph_end_rewriting(CUgraph graph);

/* ---- capture.c ---- */

/* What an event stands for that was recorded in a capturing stream. */
struct capture_point {
	uint64_t capture; /* 0: none */
	uint64_t operations;
	const struct CUstream_st *stream;
};

struct capture_point capture_record(const struct CUstream_st *stream);
/* The stream waits for the event: it joins the capture, or takes in what another stream did in it. */
CUresult capture_wait(struct CUstream_st *stream, struct capture_point point);
CUresult capture_kernel(struct CUstream_st *stream, const struct kernel *kernel);
CUresult capture_copy(struct CUstream_st *stream, int kind, size_t bytes);
CUresult capture_allocation(struct CUstream_st *stream, size_t bytes, CUdeviceptr *pointer);
CUresult capture_free(struct CUstream_st *stream, CUdeviceptr pointer);
/* The stream is about to end. */
void capture_leave(struct CUstream_st *stream);
void captures_end(struct CUctx_st *context);

/* ---- memory.c ---- */

#define FIRST_DEVICE_ADDRESS 0x700000000000ull
#define END_DEVICE_ADDRESS 0x780000000000ull
#define FIRST_RESERVATION 0x740000000000ull
#define FIRST_GRAPH_ADDRESS 0x760000000000ull /* of what nodes of graphs allocate */

#define NO_DEVICE UINT32_MAX

enum memory_kind {
	MEMORY_PLAIN,
	MEMORY_LOW, /* the program gets an address of 32 bits */
	MEMORY_PHYSICAL,
	MEMORY_ARRAY,
	MEMORY_GRAPH /* of an executable graph, for all its nodes */
};

CUresult memory_take(uint32_t device, struct CUctx_st *context, size_t bytes, enum memory_kind kind, uint64_t *address);
/* CUDA_ERROR_INVALID_VALUE: no memory of that kind is there. */
CUresult memory_give_back(uint64_t address, enum memory_kind kind);
bool is_device_address(uint64_t address);
/* The device whose memory is there; NO_DEVICE where none is known. */
uint32_t device_at(uint64_t address);
void memory_forget(struct CUctx_st *context);

/* The memory that an address lies in, as the program was given it. */
struct memory_range {
	uint64_t address, bytes;
	struct CUctx_st *context;
	uint32_t device; /* the server's index; NO_DEVICE: host memory */
	bool managed;
};

bool memory_find(uint64_t address, struct memory_range *range);

/* Physical memory as it can be exported to another process; a handle is an address, which is one on the whole node. */
struct shared_memory {
	uint64_t handle, bytes;
	uint32_t device; /* the server's index */
};

/* A reference more, and what it is. CUDA_ERROR_INVALID_VALUE: no such memory is held here. */
CUresult memory_retain(uint64_t handle, struct shared_memory *memory);
CUresult memory_release(uint64_t handle);
CUresult memory_import(const struct shared_memory *memory);

/* ---- host_memory.c ---- */

/* What a copy to the host does to its pages: all become resident. */
void host_touch(void *pointer, size_t bytes);
bool host_memory_find(uint64_t address, struct memory_range *range);
void host_memory_forget(struct CUctx_st *context);

/* ---- array.c ---- */

bool is_array(CUarray array);
size_t array_element_bytes(CUarray array);
