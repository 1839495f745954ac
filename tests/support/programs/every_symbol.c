/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Calls every symbol of libcuda.so.1 that is probed, each as often as its input asks, and prints what that adds:
 *
 *   every_symbol [--fail] [THREADS]
 *   every_symbol --list [--fail]
 *
 * Standard input: lines `SYMBOL COUNT`, an empty one; it answers "ready" and has not called anything yet. A line lets it
 * go: one line of JSON. Another line, or the end of its input, ends it. With --fail allocations ask for what cannot be had.
 *
 * `symbols` has the planned calls, `setup` those that they need besides; `added` is what the successful ones of both did.
 * A call that copies a list counts as one copy. Graphs of `GRAPH_KERNELS` kernels are launched; what is captured runs not.
 */
#include <cuda.h>
#include <ptx.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "every_symbol_types.h"

enum { MOST_THREADS = 64, MOST_PLANNED = 512, LINE = 256, GRAPH_KERNELS = 3, BYTES = 12288, BUFFER = 1 << 16 };

static const char PTX[] = PTX_HEAD ".visible .entry work() { ret; }\n";
static const size_t TOO_MUCH = 1ull << 50, TOO_WIDE = 1ull << 40, GRANULE = 2 << 20, ARRAY_BYTES = 4096;
static const CUDA_ARRAY_DESCRIPTOR ARRAY = {64, 8, CU_AD_FORMAT_FLOAT, 2};
static const CUDA_ARRAY3D_DESCRIPTOR MIPMAP = {32, 16, 0, CU_AD_FORMAT_FLOAT, 1, 0};
static const CUDA_ARRAY3D_DESCRIPTOR TOO_LARGE_MIPMAP = {1ull << 40, 16, 0, CU_AD_FORMAT_FLOAT, 1, 0};
enum { MIPMAP_BYTES = (32 * 16 + 16 * 8 + 8 * 4) * 4 };
static const CUmemAllocationProp PHYSICAL = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
					     .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUDA_MEM_ALLOC_NODE_PARAMS GRAPH_MEMORY = {
	.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}},
	.bytesize = 4096};

enum effect {
	NOTHING,
	LAUNCH,
	CAPTURED,
	NODE,
	WAIT,
	CONTEXT,
	TO_DEVICE,
	TO_HOST,
	ON_DEVICE,
	MEMSET,
	ALLOC_PLAIN,
	ALLOC_MANAGED,
	ALLOC_POOL,
	ALLOC_VIRTUAL,
	ALLOC_ARRAY,
	ALLOC_GRAPH,
	ALLOC_PINNED,
	FREE_PLAIN,
	FREE_MANAGED,
	FREE_POOL,
	FREE_VIRTUAL,
	FREE_ARRAY,
	FREE_GRAPH,
	FREE_PINNED,
	FREE_WITH_CONTEXT, /* of plain memory */
	EFFECTS
};
static const char *const EFFECT_NAMES[EFFECTS] = {
	"nothing",	"launch",	 "captured",   "node",		"wait",
	"context",	"to_device",	 "to_host",    "on_device",	"memset",
	"alloc_plain",	"alloc_managed", "alloc_pool", "alloc_virtual", "alloc_array",
	"alloc_graph",	"alloc_pinned",	 "free_plain", "free_managed",	"free_pool",
	"free_virtual", "free_array",	 "free_graph", "free_pinned",	"free_with_context"};

struct worker {
	CUcontext context;
	CUstream stream, second;
	CUevent event;
	CUmodule module;
	CUfunction function;
	CUlibrary library;
	CUkernel kern;
	CUlaunchConfig config;
	CUDA_KERNEL_NODE_PARAMS kernel;
	CUgraph graph;
	CUgraphExec exec;
	CUarray array;
	CUdeviceptr device, managed;
	CUdeviceptr_v1 low;
	CUmemGenericAllocationHandle physical;
	CUdeviceptr range; /* reserved for it */
	CUdevResource sms;
	CUdevResourceDesc resources;
	char bus_id[16];
	int exported; /* `physical` as a file descriptor */
	void *pinned;
	char *host, *spare;
	int number;
};

struct symbol {
	const char *name;
	enum effect effect;
	uint64_t amount; /* bytes, or kernels, of a successful call */
	CUresult (*call)(struct worker *w, void *address); /* NULL: for setting up only */
	void *address;
	_Atomic uint64_t calls, succeeded, setup;
};

static struct {
	_Atomic uint64_t calls, amount;
} added[EFFECTS];
static struct {
	struct symbol *symbol;
	uint64_t count;
} plan[MOST_PLANNED];
static size_t planned;
static int threads = 1;
static bool failing;
static CUcontext shared;
static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t all_set_up;

static void check(CUresult result, const char *name)
{
	if (result == CUDA_SUCCESS)
		return;
	fprintf(stderr, "every_symbol: %s: error %d\n", name, (int)result);
	_Exit(1);
}

static void add(enum effect effect, uint64_t amount)
{
	atomic_fetch_add(&added[effect].calls, 1);
	atomic_fetch_add(&added[effect].amount, amount);
}

/* ---- the table ---- */

static struct symbol *named(const char *name);
static void primary_fill(void);

/* A graph of one node, and an executable graph of that. */
struct small {
	CUgraph graph;
	CUgraphNode node;
	CUgraphExec exec;
};
static struct small small_graph(struct worker *w, CUgraphNodeType type);
static void end_small(struct small *small);

/* One call of another symbol. */
#define SETUP_AS(name, effect_, amount_, type, ...)                                                                    \
	({                                                                                                             \
		struct symbol *symbol_ = named(#name);                                                                 \
		atomic_fetch_add(&symbol_->setup, 1);                                                                  \
		check(((__typeof__(type) *)symbol_->address)(__VA_ARGS__), #name);                                     \
		add(effect_, amount_);                                                                                 \
	})
#define SETUP_BYTES(name, amount, type, ...) SETUP_AS(name, symbol_->effect, amount, type, __VA_ARGS__)
#define SETUP(name, type, ...) SETUP_AS(name, symbol_->effect, 0, type, __VA_ARGS__)

#define REGISTER(name_, effect_, amount_, call_)                                                                       \
	static struct symbol symbol_##name_ = {.name = #name_, .effect = effect_, .amount = amount_, .call = call_};   \
	static struct symbol *const entry_##name_ __attribute__((section("symbols"), used)) = &symbol_##name_;
#define SYMBOL(name, effect, amount, type, ...)                                                                        \
	static CUresult call_##name(struct worker *w, void *address)                                                   \
	{                                                                                                              \
		__typeof__(type) *f = (__typeof__(type) *)address;                                                     \
		(void)w;                                                                                               \
		__VA_ARGS__                                                                                            \
	}                                                                                                              \
	REGISTER(name, effect, amount, call_##name)

#define ROWS .srcPitch = 48, .dstPitch = 48
#define TO_DEVICE(address)                                                                                             \
	.srcMemoryType = CU_MEMORYTYPE_HOST, .srcHost = w->host, .dstMemoryType = CU_MEMORYTYPE_DEVICE,                \
	.dstDevice = (address), ROWS
#define FROM_DEVICE(address)                                                                                           \
	.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = (address), .dstMemoryType = CU_MEMORYTYPE_HOST,            \
	.dstHost = w->host, ROWS
#define ON_DEVICE(address)                                                                                             \
	.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = (address), .dstMemoryType = CU_MEMORYTYPE_DEVICE,          \
	.dstDevice = (address) + BYTES, ROWS

#include "every_symbol_calls.h"

REGISTER(cuInit, NOTHING, 0, NULL)
REGISTER(cuEventCreate, NOTHING, 0, NULL)
REGISTER(cuModuleLoadData, NOTHING, 0, NULL)
REGISTER(cuLibraryLoadData, NOTHING, 0, NULL)
REGISTER(cuMemAddressReserve, NOTHING, 0, NULL)
REGISTER(cuMemExportToShareableHandle, NOTHING, 0, NULL)
REGISTER(cuDeviceGetDevResource, NOTHING, 0, NULL)
REGISTER(cuDeviceGetPCIBusId, NOTHING, 0, NULL)
REGISTER(cuDevResourceGenerateDesc, NOTHING, 0, NULL)

extern struct symbol *const __start_symbols[], *const __stop_symbols[];

static struct symbol *named(const char *name)
{
	for (struct symbol *const *at = __start_symbols; at < __stop_symbols; at++)
		if (strcmp((*at)->name, name) == 0)
			return *at;
	fprintf(stderr, "every_symbol: no such symbol: %s\n", name);
	_Exit(2);
}

/* A primary context with memory in it; the lock is held for the call that ends it. */
static void primary_fill(void)
{
	CUcontext context;
	CUdeviceptr memory;

	pthread_mutex_lock(&primary_lock);
	SETUP(cuDevicePrimaryCtxRetain, T(cuDevicePrimaryCtxRetain), &context, 0);
	SETUP(cuCtxPushCurrent_v2, T(cuCtxPushCurrent), context);
	SETUP_BYTES(cuMemAlloc_v2, 4096, T(cuMemAlloc), &memory, 4096);
	SETUP(cuCtxPopCurrent_v2, T(cuCtxPopCurrent), NULL);
}

/* ---- workers ---- */

static CUgraph graph_of(struct worker *w, int kernels, CUgraph child)
{
	CUgraphNode node;
	CUgraph graph;

	SETUP(cuGraphCreate, T(cuGraphCreate), &graph, 0);
	for (int i = 0; i < kernels; i++)
		SETUP(cuGraphAddKernelNode_v2, T(cuGraphAddKernelNode), &node, graph, NULL, 0, &w->kernel);
	if (child)
		SETUP(cuGraphAddChildGraphNode, T(cuGraphAddChildGraphNode), &node, graph, NULL, 0, child);
	return graph;
}

/* A launched graph of one kernel, with memory. */
static void hold_graph_memory(struct worker *w)
{
	CUDA_MEM_ALLOC_NODE_PARAMS memory = GRAPH_MEMORY;
	CUgraph graph = graph_of(w, 1, NULL);
	CUgraphNode node;
	CUgraphExec exec;

	SETUP(cuGraphAddMemAllocNode, T(cuGraphAddMemAllocNode), &node, graph, NULL, 0, &memory);
	SETUP(cuGraphInstantiateWithFlags, T(cuGraphInstantiate), &exec, graph, 0);
	SETUP_AS(cuGraphLaunch, LAUNCH, 1, T(cuGraphLaunch), exec, w->stream);
	add(ALLOC_GRAPH, memory.bytesize);
}

static struct small small_graph(struct worker *w, CUgraphNodeType type)
{
	CUgraphNodeParams params = {.type = type};
	struct small made;

	if (type == CU_GRAPH_NODE_TYPE_KERNEL)
		params.kernel = w->kernel;
	else if (type == CU_GRAPH_NODE_TYPE_MEMCPY)
		params.memcpy = (CUDA_MEMCPY_NODE_PARAMS){
			.copyCtx = w->context,
			.copyParams = {FROM_DEVICE(w->device), .WidthInBytes = 48, .Height = 1, .Depth = 1}};
	else if (type == CU_GRAPH_NODE_TYPE_MEMSET)
		params.memset = (CUDA_MEMSET_NODE_PARAMS_v2){w->device, 0, 0, 1, 32, 1, w->context};
	else
		params.graph.graph = w->graph;
	SETUP(cuGraphCreate, T(cuGraphCreate), &made.graph, 0);
	SETUP(cuGraphAddNode, T(cuGraphAddNode), &made.node, made.graph, NULL, 0, &params);
	SETUP(cuGraphInstantiateWithFlags, T(cuGraphInstantiate), &made.exec, made.graph, 0);
	return made;
}

static void end_small(struct small *small)
{
	SETUP(cuGraphExecDestroy, T(cuGraphExecDestroy), small->exec);
	SETUP(cuGraphDestroy, T(cuGraphDestroy), small->graph);
}

static void set_up_memory(struct worker *w)
{
	w->host = calloc(1, BUFFER);
	w->spare = aligned_alloc(4096, 8192);
	if (!w->host || !w->spare)
		check(CUDA_ERROR_OUT_OF_MEMORY, "memory");
	SETUP_BYTES(cuMemAlloc_v2, BUFFER, T(cuMemAlloc), &w->device, BUFFER);
	SETUP_BYTES(cuMemAlloc, BUFFER, CUresult(CUdeviceptr_v1 *, unsigned), &w->low, BUFFER);
	SETUP_BYTES(cuMemAllocManaged, BUFFER, T(cuMemAllocManaged), &w->managed, BUFFER, CU_MEM_ATTACH_GLOBAL);
	SETUP_BYTES(cuMemHostAlloc, 4096, T(cuMemHostAlloc), &w->pinned, 4096, 0);
	SETUP_BYTES(cuArrayCreate_v2, ARRAY_BYTES, T(cuArrayCreate), &w->array, &ARRAY);
	SETUP_BYTES(cuMemCreate, GRANULE, T(cuMemCreate), &w->physical, GRANULE, &PHYSICAL, 0);
	SETUP(cuMemAddressReserve, T(cuMemAddressReserve), &w->range, GRANULE, 0, 0, 0);
	SETUP(cuMemExportToShareableHandle, T(cuMemExportToShareableHandle), &w->exported, w->physical,
	      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
}

static void set_up(struct worker *w)
{
	CUgraph child;

	w->context = shared;
	SETUP(cuCtxSetCurrent, T(cuCtxSetCurrent), shared);
	SETUP(cuDeviceGetPCIBusId, T(cuDeviceGetPCIBusId), w->bus_id, sizeof(w->bus_id), 0);
	SETUP(cuDeviceGetDevResource, T(cuDeviceGetDevResource), 0, &w->sms, CU_DEV_RESOURCE_TYPE_SM);
	SETUP(cuDevResourceGenerateDesc, T(cuDevResourceGenerateDesc), &w->resources, &w->sms, 1);
	SETUP(cuStreamCreate, T(cuStreamCreate), &w->stream, CU_STREAM_NON_BLOCKING);
	SETUP(cuStreamCreate, T(cuStreamCreate), &w->second, CU_STREAM_NON_BLOCKING);
	SETUP(cuEventCreate, T(cuEventCreate), &w->event, CU_EVENT_DISABLE_TIMING);
	SETUP(cuEventRecord, T(cuEventRecord), w->event, w->stream);
	SETUP(cuModuleLoadData, T(cuModuleLoadData), &w->module, PTX);
	SETUP(cuModuleGetFunction, T(cuModuleGetFunction), &w->function, w->module, "work");
	SETUP(cuLibraryLoadData, T(cuLibraryLoadData), &w->library, PTX, NULL, NULL, 0, NULL, NULL, 0);
	SETUP(cuLibraryGetKernel, T(cuLibraryGetKernel), &w->kern, w->library, "work");
	SETUP(cuFuncSetBlockShape, T(cuFuncSetBlockShape), w->function, 32, 1, 1);
	w->config = (CUlaunchConfig){2, 1, 1, 64, 1, 1, 0, w->stream, NULL, 0};
	w->kernel = (CUDA_KERNEL_NODE_PARAMS){w->function, 2, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL, NULL};
	set_up_memory(w);
	hold_graph_memory(w);
	child = graph_of(w, GRAPH_KERNELS - 1, NULL);
	w->graph = graph_of(w, 1, child);
	SETUP(cuGraphInstantiateWithFlags, T(cuGraphInstantiate), &w->exec, w->graph, 0);
}

static void call(struct worker *w, struct symbol *symbol)
{
	CUresult result = symbol->call(w, symbol->address);

	atomic_fetch_add(&symbol->calls, 1);
	if (result == CUDA_SUCCESS) {
		atomic_fetch_add(&symbol->succeeded, 1);
		add(symbol->effect, symbol->amount);
	} else if (!failing) {
		check(result, symbol->name);
	}
}

/* Each thread begins elsewhere in the plan, so that they are not all in the same call. */
static void *work(void *argument)
{
	struct worker *w = argument;

	set_up(w);
	pthread_barrier_wait(&all_set_up);
	for (size_t i = 0; i < planned; i++) {
		size_t at = (i + (size_t)w->number * planned / (size_t)threads) % planned;
		uint64_t share = plan[at].count / (uint64_t)threads;

		if ((uint64_t)w->number < plan[at].count % (uint64_t)threads)
			share++;
		while (share--)
			call(w, plan[at].symbol);
	}
	return NULL;
}

static void work_in_threads(void)
{
	static struct worker workers[MOST_THREADS];
	pthread_t running[MOST_THREADS];

	SETUP(cuInit, T(cuInit), 0);
	SETUP(cuCtxCreate_v2, T(cuCtxCreate), &shared, 0, 0);
	pthread_barrier_init(&all_set_up, NULL, (unsigned)threads);
	for (int i = 0; i < threads; i++) {
		workers[i].number = i;
		if (pthread_create(&running[i], NULL, work, &workers[i]))
			check(CUDA_ERROR_OUT_OF_MEMORY, "thread");
	}
	for (int i = 0; i < threads; i++)
		pthread_join(running[i], NULL);
	/* A comparison with the GPU finds everything done. */
	SETUP(cuCtxSynchronize, T(cuCtxSynchronize));
}

/* ---- what was asked, what was done ---- */

static bool can_fail(const struct symbol *symbol)
{
	return symbol->effect >= ALLOC_PLAIN && symbol->effect <= ALLOC_PINNED;
}

static bool drivable(const struct symbol *symbol)
{
	return symbol->call && (!failing || can_fail(symbol));
}

static void list(void)
{
	for (struct symbol *const *at = __start_symbols; at < __stop_symbols; at++)
		if (drivable(*at))
			puts((*at)->name);
}

static void find_symbols(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);

	for (struct symbol *const *at = __start_symbols; at < __stop_symbols; at++) {
		(*at)->address = library ? dlsym(library, (*at)->name) : NULL;
		if (!(*at)->address) {
			fprintf(stderr, "every_symbol: %s\n", dlerror());
			exit(1);
		}
	}
}

static void read_plan(void)
{
	char line[LINE], name[LINE];
	unsigned long long count;

	while (fgets(line, sizeof(line), stdin) && line[0] != '\n') {
		if (planned == MOST_PLANNED || sscanf(line, "%255s %llu", name, &count) != 2 ||
		    !drivable(named(name))) {
			fprintf(stderr, "every_symbol: not in the plan: %s", line);
			exit(2);
		}
		plan[planned].symbol = named(name);
		plan[planned++].count = count;
	}
}

static void print_symbols(void)
{
	const char *separator = "";

	printf("{\"symbols\": {");
	for (struct symbol *const *at = __start_symbols; at < __stop_symbols; at++) {
		const struct symbol *s = *at;

		if (!s->calls)
			continue;
		printf("%s\"%s\": {\"calls\": %lu, \"succeeded\": %lu, \"failed\": %lu, \"effect\": \"%s\", "
		       "\"amount\": %lu}",
		       separator, s->name, s->calls, s->succeeded, s->calls - s->succeeded, EFFECT_NAMES[s->effect],
		       s->succeeded * s->amount);
		separator = ", ";
	}
	separator = "";
	printf("}, \"setup\": {");
	for (struct symbol *const *at = __start_symbols; at < __stop_symbols; at++)
		if ((*at)->setup) {
			printf("%s\"%s\": %lu", separator, (*at)->name, (*at)->setup);
			separator = ", ";
		}
}

static void print_added(void)
{
	printf("}, \"added\": {");
	for (int i = 0; i < EFFECTS; i++)
		printf("%s\"%s\": {\"calls\": %lu, \"amount\": %lu}", i ? ", " : "", EFFECT_NAMES[i], added[i].calls,
		       added[i].amount);
	printf("}}\n");
	fflush(stdout);
}

int main(int argc, char **argv)
{
	bool listing = false;
	char line[LINE];

	for (int i = 1; i < argc; i++)
		if (strcmp(argv[i], "--fail") == 0)
			failing = true;
		else if (strcmp(argv[i], "--list") == 0)
			listing = true;
		else
			threads = atoi(argv[i]);
	if (threads < 1 || threads > MOST_THREADS)
		return 2;
	if (listing) {
		list();
		return 0;
	}
	find_symbols();
	read_plan();
	puts("ready");
	fflush(stdout);
	if (!fgets(line, sizeof(line), stdin))
		return 0;
	work_in_threads();
	print_symbols();
	print_added();
	return fgets(line, sizeof(line), stdin) || feof(stdin) ? 0 : 1;
}
