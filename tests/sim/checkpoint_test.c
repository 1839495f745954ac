/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * One process locks, saves and restores another, against a server with a GPU of 4 SMs and 3 GiB. `checkpoint_test` lists
 * the tests, `checkpoint_test NAME` runs one. $GPUSIM is the server's program.
 */
#include <cuda.h>
#include <ptx.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum {
	DEADLINE_S = 60,
	LIMIT_MS = 20000,
	SHORT_MS = 200,
	NOBODY = 65534,
	THREADS = 4,
	ROUNDS = 40,
	GRAPH = 5,
	CONTEXT_MIB = 520
};

static const size_t MIB = 1 << 20;
static const unsigned long long MS = 1000000;
static const char PTX[] = PTX_HEAD ".visible .entry spin(.param .u64 spin_ns) { ret; }\n";

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                        \
			kill_target();                                                                                 \
			_exit(1);                                                                                      \
		}                                                                                                      \
	} while (0)
#define OK(call) CHECK((call) == CUDA_SUCCESS)

/* Shared between the processes of a test. */
static struct {
	_Atomic int ready, go;
	_Atomic long count;
	CUipcMemHandle handle;
} * board;
static pid_t target;
static CUfunction spin;

static void kill_target(void)
{
	if (target > 0)
		kill(target, SIGKILL);
}

static void nap(void)
{
	nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void begin(void)
{
	CUcontext context;
	CUmodule module;

	OK(cuInit(0));
	OK(cuDevicePrimaryCtxRetain(&context, 0));
	OK(cuCtxSetCurrent(context));
	OK(cuModuleLoadData(&module, PTX));
	OK(cuModuleGetFunction(&spin, module, "spin"));
}

static CUresult launch(unsigned long long ns, CUstream stream)
{
	return cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, stream, (void *[]){&ns}, NULL);
}

/* Runs `body` in a process of its own until it reports that it is ready. */
static void start(void (*body)(void))
{
	atomic_store(&board->ready, 0);
	atomic_store(&board->go, 0);
	target = fork();
	CHECK(target >= 0);
	if (target == 0) {
		target = -1;
		alarm(DEADLINE_S);
		body();
		_exit(0);
	}
	while (!atomic_load(&board->ready)) {
		CHECK(waitpid(target, NULL, WNOHANG) == 0);
		nap();
	}
}

static void say_ready(void)
{
	atomic_store(&board->ready, 1);
}

static void wait_for_go(void)
{
	while (!atomic_load(&board->go))
		nap();
}

static void end_target(void)
{
	kill_target();
	CHECK(waitpid(target, NULL, 0) == target);
}

static void target_ends_well(void)
{
	int status;

	CHECK(waitpid(target, &status, 0) == target);
	target = -1;
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

static CUresult lock_for(unsigned ms)
{
	return cuCheckpointProcessLock(target, &(CUcheckpointLockArgs){.timeoutMs = ms});
}

static CUprocessState state(void)
{
	CUprocessState found = CU_PROCESS_STATE_FAILED;

	OK(cuCheckpointProcessGetState(target, &found));
	return found;
}

/* More launches than before, as soon as they come. */
static void goes_on(void)
{
	long before = atomic_load(&board->count);

	while (atomic_load(&board->count) < before + 3)
		nap();
}

/* ---- what the others do ---- */

static void launch_without_end(void)
{
	begin();
	for (;;) {
		OK(launch(MS / 10, NULL));
		OK(cuCtxSynchronize());
		atomic_fetch_add(&board->count, 1);
		say_ready();
	}
}

static void keep_busy(unsigned long long ns)
{
	begin();
	OK(launch(ns, NULL));
	say_ready();
	OK(cuCtxSynchronize());
	for (;;) {
		OK(launch(MS / 10, NULL));
		OK(cuCtxSynchronize());
		atomic_fetch_add(&board->count, 1);
	}
}

static void launch_one_that_never_ends(void)
{
	keep_busy(3600 * 1000 * MS);
}

static void launch_one_that_takes_a_while(void)
{
	keep_busy(300 * MS);
}

static void launch_beside_a_long_one(void)
{
	CUstream slow, fast;

	begin();
	OK(cuStreamCreate(&slow, CU_STREAM_NON_BLOCKING));
	OK(cuStreamCreate(&fast, CU_STREAM_NON_BLOCKING));
	OK(launch(3000 * MS, slow));
	for (;;) {
		OK(launch(MS / 10, fast));
		OK(cuStreamSynchronize(fast));
		atomic_fetch_add(&board->count, 1);
		say_ready();
	}
}

static void hold_memory(void)
{
	CUdeviceptr pointer;

	begin();
	OK(cuMemAlloc(&pointer, 1024 * MIB));
	say_ready();
	wait_for_go();
	OK(cuMemsetD8(pointer, 0, MIB));
	OK(cuMemFree(pointer));
	OK(cuMemAlloc(&pointer, 1024 * MIB));
}

static void share_memory(void)
{
	CUdeviceptr pointer;

	begin();
	OK(cuMemAlloc(&pointer, MIB));
	OK(cuIpcGetMemHandle(&board->handle, pointer));
	say_ready();
	wait_for_go();
	OK(cuMemFree(pointer));
	atomic_store(&board->go, 0);
	wait_for_go();
}

static void do_nothing(void)
{
	say_ready();
	for (;;)
		nap();
}

static void *launch_graphs(void *exec)
{
	CUcontext context;

	OK(cuDevicePrimaryCtxRetain(&context, 0));
	OK(cuCtxSetCurrent(context));
	for (;;) {
		CUstream stream;

		OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
		OK(cuGraphLaunch(exec, stream));
		OK(cuStreamSynchronize(stream));
		OK(cuStreamDestroy(stream));
		atomic_fetch_add(&board->count, 1);
		say_ready();
	}
	return NULL;
}

static void launch_graphs_from_many_threads(void)
{
	CUgraph graph;
	CUgraphExec exec;
	CUgraphNode node;
	pthread_t thread;
	unsigned long long ns = MS / 50;
	CUDA_KERNEL_NODE_PARAMS params = {.gridDimX = 1,
					  .gridDimY = 1,
					  .gridDimZ = 1,
					  .blockDimX = 32,
					  .blockDimY = 1,
					  .blockDimZ = 1,
					  .kernelParams = (void *[]){&ns}};

	begin();
	params.func = spin;
	OK(cuGraphCreate(&graph, 0));
	for (int i = 0; i < GRAPH; i++)
		OK(cuGraphAddKernelNode(&node, graph, NULL, 0, &params));
	OK(cuGraphInstantiate(&exec, graph, 0));
	for (int i = 0; i < THREADS - 1; i++)
		CHECK(pthread_create(&thread, NULL, launch_graphs, exec) == 0);
	launch_graphs(exec);
}

static void host_function(void *unused)
{
	(void)unused;
	wait_for_go();
	atomic_fetch_add(&board->count, 1);
}

static void wait_in_a_host_function(void)
{
	begin();
	OK(cuLaunchHostFunc(NULL, host_function, NULL));
	say_ready();
	for (;;)
		nap();
}

/* ---- the tests ---- */

static void each_state_allows_what_it_should(void)
{
	int tid = 0;

	start(launch_without_end);
	OK(cuCheckpointProcessGetRestoreThreadId(target, &tid));
	CHECK(tid == target);
	CHECK(state() == CU_PROCESS_STATE_RUNNING);
	CHECK(cuCheckpointProcessUnlock(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	CHECK(cuCheckpointProcessCheckpoint(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	CHECK(cuCheckpointProcessRestore(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	OK(cuCheckpointProcessLock(target, NULL));
	CHECK(state() == CU_PROCESS_STATE_LOCKED);
	CHECK(cuCheckpointProcessLock(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	CHECK(cuCheckpointProcessRestore(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	OK(cuCheckpointProcessCheckpoint(target, NULL));
	CHECK(state() == CU_PROCESS_STATE_CHECKPOINTED);
	CHECK(cuCheckpointProcessLock(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	CHECK(cuCheckpointProcessCheckpoint(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	CHECK(cuCheckpointProcessUnlock(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	OK(cuCheckpointProcessRestore(target, NULL));
	CHECK(state() == CU_PROCESS_STATE_LOCKED);
	OK(cuCheckpointProcessUnlock(target, NULL));
	CHECK(state() == CU_PROCESS_STATE_RUNNING);
	goes_on();
	end_target();
}

static void a_locked_process_launches_nothing_until_it_is_unlocked(void)
{
	long before;

	start(launch_without_end);
	OK(lock_for(LIMIT_MS));
	before = atomic_load(&board->count);
	for (int i = 0; i < 50; i++)
		nap();
	/* its last launch was done when it was locked; that it is counted may come later */
	CHECK(atomic_load(&board->count) <= before + 1);
	OK(cuCheckpointProcessUnlock(target, NULL));
	goes_on();
	end_target();
}

static void a_lock_gives_up_in_time_and_leaves_no_trace(void)
{
	start(launch_one_that_never_ends);
	CHECK(lock_for(SHORT_MS) == CUDA_ERROR_NOT_READY);
	CHECK(state() == CU_PROCESS_STATE_RUNNING);
	CHECK(cuCheckpointProcessUnlock(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	end_target();
}

static void a_lock_waits_for_the_work_that_was_launched(void)
{
	start(launch_one_that_takes_a_while);
	OK(lock_for(LIMIT_MS));
	OK(cuCheckpointProcessUnlock(target, NULL));
	goes_on();
	end_target();
}

static void a_lock_waits_for_host_functions(void)
{
	start(wait_in_a_host_function);
	CHECK(lock_for(SHORT_MS) == CUDA_ERROR_NOT_READY);
	atomic_store(&board->go, 1);
	OK(lock_for(LIMIT_MS));
	CHECK(atomic_load(&board->count) == 1);
	end_target();
}

static void what_is_saved_leaves_its_place_to_others(void)
{
	CUdeviceptr mine;

	start(hold_memory);
	begin();
	CHECK(cuMemAlloc(&mine, 1024 * MIB) == CUDA_ERROR_OUT_OF_MEMORY);
	OK(lock_for(LIMIT_MS));
	CHECK(cuMemAlloc(&mine, 1024 * MIB) == CUDA_ERROR_OUT_OF_MEMORY);
	OK(cuCheckpointProcessCheckpoint(target, NULL));
	OK(cuMemAlloc(&mine, 1024 * MIB));
	OK(cuMemFree(mine));
	OK(cuCheckpointProcessRestore(target, NULL));
	CHECK(cuMemAlloc(&mine, 1024 * MIB) == CUDA_ERROR_OUT_OF_MEMORY);
	atomic_store(&board->go, 1);
	OK(cuCheckpointProcessUnlock(target, NULL));
	target_ends_well();
}

static void what_was_restored_without_room_is_never_restored_again(void)
{
	CUdeviceptr mine;

	start(hold_memory);
	begin();
	OK(lock_for(LIMIT_MS));
	OK(cuCheckpointProcessCheckpoint(target, NULL));
	OK(cuMemAlloc(&mine, 1024 * MIB));
	CHECK(cuCheckpointProcessRestore(target, NULL) == CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(state() == CU_PROCESS_STATE_CHECKPOINTED);
	OK(cuMemFree(mine));
	CHECK(cuCheckpointProcessRestore(target, NULL) == CUDA_ERROR_OPERATING_SYSTEM); /* as R580 */
	CHECK(state() == CU_PROCESS_STATE_CHECKPOINTED);
	end_target();
}

static void *lock_briefly(void *result)
{
	*(_Atomic int *)result = (int)lock_for(SHORT_MS);
	return NULL;
}

static void locking_a_stopped_process_waits_until_it_runs_whatever_its_limit(void)
{
	_Atomic int result = -1;
	pthread_t thread;

	start(launch_without_end);
	CHECK(kill(target, SIGSTOP) == 0);
	CHECK(waitpid(target, NULL, WUNTRACED) == target);
	CHECK(pthread_create(&thread, NULL, lock_briefly, &result) == 0);
	for (int i = 0; i < 2 * SHORT_MS; i++)
		nap();
	CHECK(atomic_load(&result) == -1);
	CHECK(state() == CU_PROCESS_STATE_LOCKED);
	CHECK(kill(target, SIGCONT) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(atomic_load(&result) == CUDA_SUCCESS);
	OK(cuCheckpointProcessUnlock(target, NULL));
	goes_on();
	end_target();
}

static unsigned long long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (unsigned long long)now.tv_sec * 1000 + (unsigned long long)now.tv_nsec / MS;
}

/* The server is configured so: 100 ms and 4 GB/s, 50 ms and 8 GB/s. */
static void saving_and_restoring_last_as_long_as_they_are_told_to(void)
{
	unsigned long long begun;

	start(hold_memory);
	OK(lock_for(LIMIT_MS));
	begun = now_ms();
	OK(cuCheckpointProcessCheckpoint(target, NULL));
	CHECK(now_ms() - begun >= 100 + 268 - 1);
	begun = now_ms();
	OK(cuCheckpointProcessRestore(target, NULL));
	CHECK(now_ms() - begun >= 50 + 134 - 1);
	end_target();
}

static void *unlock(void *result)
{
	*(_Atomic int *)result = (int)cuCheckpointProcessUnlock(target, NULL);
	return NULL;
}

static void unlocking_a_stopped_process_waits_until_it_runs(void)
{
	_Atomic int result = -1;
	pthread_t thread;

	start(launch_without_end);
	OK(lock_for(LIMIT_MS));
	CHECK(kill(target, SIGSTOP) == 0);
	CHECK(waitpid(target, NULL, WUNTRACED) == target);
	CHECK(pthread_create(&thread, NULL, unlock, &result) == 0);
	for (int i = 0; i < 50; i++)
		nap();
	CHECK(atomic_load(&result) == -1);
	CHECK(state() == CU_PROCESS_STATE_LOCKED);
	CHECK(kill(target, SIGCONT) == 0);
	CHECK(pthread_join(thread, NULL) == 0);
	CHECK(atomic_load(&result) == CUDA_SUCCESS);
	goes_on();
	end_target();
}

static void a_lock_outlives_the_process_that_asked(void)
{
	pid_t locker;

	start(launch_without_end);
	locker = fork();
	if (locker == 0)
		_exit(lock_for(LIMIT_MS) == CUDA_SUCCESS ? 0 : 1);
	CHECK(waitpid(locker, NULL, 0) == locker);
	CHECK(state() == CU_PROCESS_STATE_LOCKED);
	OK(cuCheckpointProcessUnlock(target, NULL));
	goes_on();
	end_target();
}

static void a_lock_under_way_goes_on_when_its_caller_is_killed(void)
{
	pid_t locker;
	long before;

	start(launch_beside_a_long_one);
	locker = fork();
	if (locker == 0)
		_exit((int)lock_for(LIMIT_MS));
	do { /* no launches any more: it is under way */
		before = atomic_load(&board->count);
		for (int i = 0; i < 300; i++)
			nap();
	} while (atomic_load(&board->count) != before);
	kill(locker, SIGKILL);
	CHECK(waitpid(locker, NULL, 0) == locker);
	CHECK(state() == CU_PROCESS_STATE_LOCKED); /* though its work still drains */
	OK(cuCheckpointProcessUnlock(target, NULL));
	goes_on();
	end_target();
}

static void a_saved_process_that_is_killed_gives_nothing_back_twice(void)
{
	CUprocessState found;
	size_t free_bytes, total;

	start(hold_memory);
	begin();
	OK(lock_for(LIMIT_MS));
	OK(cuCheckpointProcessCheckpoint(target, NULL));
	end_target();
	while (cuCheckpointProcessGetState(target, &found) == CUDA_SUCCESS)
		nap();
	OK(cuMemGetInfo(&free_bytes, &total));
	CHECK(free_bytes + CONTEXT_MIB * MIB == total);
}

static void a_program_without_cuda_is_not_initialized(void)
{
	CUprocessState found;

	start(do_nothing);
	CHECK(cuCheckpointProcessGetState(target, &found) == CUDA_ERROR_NOT_INITIALIZED);
	CHECK(lock_for(SHORT_MS) == CUDA_ERROR_NOT_INITIALIZED);
	end_target();
	CHECK(cuCheckpointProcessGetState(target, &found) == CUDA_ERROR_OPERATING_SYSTEM); /* as R580 */
	CHECK(cuCheckpointProcessGetState(0, &found) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuCheckpointProcessGetState(getpid(), NULL) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuCheckpointProcessLock(getpid(), &(CUcheckpointLockArgs){.reserved0 = 1}) == CUDA_ERROR_INVALID_VALUE);
}

static void others_may_not_lock_it(void)
{
	pid_t other;
	int status;

	if (geteuid() != 0)
		return; /* only root can become another user */
	start(launch_without_end);
	other = fork();
	if (other == 0) {
		CHECK(setuid(NOBODY) == 0);
		_exit(lock_for(LIMIT_MS) == CUDA_ERROR_NOT_PERMITTED ? 0 : 1);
	}
	CHECK(waitpid(other, &status, 0) == other);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	goes_on();
	end_target();
}

static void shared_memory_cannot_be_saved(void)
{
	CUdeviceptr theirs;

	start(share_memory);
	begin();
	OK(cuIpcOpenMemHandle(&theirs, board->handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS));
	OK(lock_for(LIMIT_MS));
	CHECK(cuCheckpointProcessCheckpoint(target, NULL) == CUDA_ERROR_NOT_SUPPORTED);
	CHECK(state() == CU_PROCESS_STATE_LOCKED);
	OK(cuCheckpointProcessUnlock(target, NULL));
	OK(cuIpcCloseMemHandle(theirs));
	CHECK(cuIpcCloseMemHandle(theirs) == CUDA_ERROR_INVALID_VALUE);
	atomic_store(&board->go, 1);
	while (atomic_load(&board->go))
		nap();
	OK(lock_for(LIMIT_MS));
	OK(cuCheckpointProcessCheckpoint(target, NULL)); /* what it shared is freed */
	end_target();
}

static void a_checkpoint_that_fails_leaves_it_failed(void)
{
	char command[256];

	start(launch_without_end);
	snprintf(command, sizeof(command), "\"$GPUSIM\" fault checkpoint-fails %d", target);
	CHECK(system(command) == 0);
	OK(lock_for(LIMIT_MS));
	CHECK(cuCheckpointProcessCheckpoint(target, NULL) == CUDA_ERROR_UNKNOWN);
	CHECK(state() == CU_PROCESS_STATE_FAILED);
	CHECK(cuCheckpointProcessUnlock(target, NULL) == CUDA_ERROR_ILLEGAL_STATE);
	end_target();
}

static void calls_of_many_threads_and_locks_do_not_hurt_each_other(void)
{
	start(launch_graphs_from_many_threads);
	for (int i = 0; i < ROUNDS; i++) {
		OK(lock_for(LIMIT_MS));
		if (i % 2) {
			OK(cuCheckpointProcessCheckpoint(target, NULL));
			OK(cuCheckpointProcessRestore(target, NULL));
		}
		OK(cuCheckpointProcessUnlock(target, NULL));
		goes_on();
	}
	CHECK(waitpid(target, NULL, WNOHANG) == 0);
	end_target();
}

static void an_mps_client_is_refused(void)
{
	start(launch_without_end);
	CHECK(state() == CU_PROCESS_STATE_RUNNING);
	CHECK(lock_for(LIMIT_MS) == CUDA_ERROR_NOT_SUPPORTED);
	goes_on();
	end_target();
}

struct test {
	const char *name;
	void (*run)(void);
};

#define TEST(name)                                                                                                     \
	{                                                                                                              \
#name, name                                                                                            \
	}

static const struct test TESTS[] = {
	TEST(each_state_allows_what_it_should),
	TEST(a_locked_process_launches_nothing_until_it_is_unlocked),
	TEST(a_lock_gives_up_in_time_and_leaves_no_trace),
	TEST(a_lock_waits_for_the_work_that_was_launched),
	TEST(a_lock_waits_for_host_functions),
	TEST(what_is_saved_leaves_its_place_to_others),
	TEST(what_was_restored_without_room_is_never_restored_again),
	TEST(locking_a_stopped_process_waits_until_it_runs_whatever_its_limit),
	TEST(saving_and_restoring_last_as_long_as_they_are_told_to),
	TEST(unlocking_a_stopped_process_waits_until_it_runs),
	TEST(a_lock_outlives_the_process_that_asked),
	TEST(a_lock_under_way_goes_on_when_its_caller_is_killed),
	TEST(a_saved_process_that_is_killed_gives_nothing_back_twice),
	TEST(a_program_without_cuda_is_not_initialized),
	TEST(others_may_not_lock_it),
	TEST(shared_memory_cannot_be_saved),
	TEST(a_checkpoint_that_fails_leaves_it_failed),
	TEST(calls_of_many_threads_and_locks_do_not_hurt_each_other),
	TEST(an_mps_client_is_refused),
};

int main(int argc, char **argv)
{
	board = mmap(NULL, sizeof(*board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	if (board == MAP_FAILED)
		return 1;
	alarm(DEADLINE_S); /* nothing may hang */
	for (size_t i = 0; i < sizeof(TESTS) / sizeof(TESTS[0]); i++) {
		if (argc == 1)
			puts(TESTS[i].name);
		else if (strcmp(argv[1], TESTS[i].name) == 0) {
			TESTS[i].run();
			return 0;
		}
	}
	return argc == 1 ? 0 : 2;
}
