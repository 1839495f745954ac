/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * The client library through its exports, against a server with two GPUs of 4 SMs and 3 GiB. `libcuda_test` lists the
 * tests, `libcuda_test NAME` runs one; the server's pid is in $SERVER_PID.
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

enum { DEADLINE_S = 60, QUEUE_DEPTH = 1022, GPUS = 2, UUID_ROOM = 48, PAGE = 4096 };

static const size_t MIB = 1 << 20;
static const unsigned long long MS = 1000000;
static const char PTX[] =
	PTX_HEAD ".visible .entry spin(.param .u64 spin_ns) { ret; }\n.visible .entry plain() { ret; }\n";

#define CHECK(condition)                                                                                               \
	do {                                                                                                           \
		if (!(condition)) {                                                                                    \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);                        \
			_exit(1);                                                                                      \
		}                                                                                                      \
	} while (0)
#define OK(call) CHECK((call) == CUDA_SUCCESS)
#define MUCH_LIKE(value, wanted) ((value) > (wanted)-0.001f && (value) < (wanted) + 0.001f)

static CUcontext contexts[GPUS];
static CUfunction spin;

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void nap(void)
{
	nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
}

static void begin(void)
{
	CUmodule module;

	OK(cuInit(0));
	OK(cuDevicePrimaryCtxRetain(&contexts[0], 0));
	OK(cuCtxSetCurrent(contexts[0]));
	OK(cuModuleLoadData(&module, PTX));
	OK(cuModuleGetFunction(&spin, module, "spin"));
}

static CUstream new_stream(unsigned flags)
{
	CUstream stream;

	OK(cuStreamCreate(&stream, flags));
	return stream;
}

static CUevent new_event(CUstream stream)
{
	CUevent event;

	OK(cuEventCreate(&event, CU_EVENT_DEFAULT));
	OK(cuEventRecord(event, stream));
	return event;
}

static float between(CUevent first, CUevent second)
{
	float ms;

	OK(cuEventElapsedTime(&ms, first, second));
	return ms;
}

static CUresult try_launch(CUstream stream, unsigned long long ns)
{
	void *parameters[] = {&ns};

	return cuLaunchKernel(spin, 1, 1, 1, 32, 1, 1, 0, stream, parameters, NULL);
}

static void launch(CUstream stream, unsigned long long ns)
{
	OK(try_launch(stream, ns));
}

static size_t free_bytes(void)
{
	size_t left, total;

	OK(cuMemGetInfo(&left, &total));
	return left;
}

/* Processes must be made before cuInit: a child cannot use its parent's GPU. */
static pid_t child(void (*run)(void))
{
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (pid)
		return pid;
	alarm(DEADLINE_S);
	run();
	_exit(0);
}

static void expect_end(pid_t pid)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

/* ---- streams and events ---- */

static void a_full_queue_blocks_and_goes_on(void)
{
	CUstream stream;
	CUevent first_done;
	uint64_t began;

	begin();
	stream = new_stream(CU_STREAM_NON_BLOCKING);
	began = now_ns();
	launch(stream, 1000 * MS);
	first_done = new_event(stream);
	for (int i = 2; i < QUEUE_DEPTH; i++)
		launch(stream, 1000);
	CHECK(cuEventQuery(first_done) == CUDA_ERROR_NOT_READY); /* so many fit while the first one runs */
	launch(stream, 1000);
	CHECK(now_ns() - began >= 1000 * MS); /* and no more */
	for (int i = 0; i < 2 * QUEUE_DEPTH; i++)
		launch(stream, 1000);
	OK(cuStreamSynchronize(stream));
	OK(cuStreamQuery(stream));
}

static void a_full_queue_blocks_no_other_stream(void)
{
	CUstream full, other;
	CUevent first_done;

	begin();
	full = new_stream(CU_STREAM_NON_BLOCKING);
	other = new_stream(CU_STREAM_NON_BLOCKING);
	launch(full, 1000 * MS);
	first_done = new_event(full);
	for (int i = 2; i < QUEUE_DEPTH; i++)
		launch(full, 1000);
	launch(other, 1000);
	OK(cuStreamSynchronize(other));
	CHECK(cuEventQuery(first_done) == CUDA_ERROR_NOT_READY);
}

static int order[100];
static _Atomic int order_count;

static void CUDAAPI note_order(void *place)
{
	order[atomic_fetch_add(&order_count, 1)] = *(int *)place;
}

static void a_stream_keeps_its_order(void)
{
	static int places[100];
	CUstream stream;

	begin();
	stream = new_stream(CU_STREAM_NON_BLOCKING);
	for (int i = 0; i < 100; i++) {
		places[i] = i;
		launch(stream, (unsigned)(100 - i) * 1000);
		OK(cuLaunchHostFunc(stream, note_order, &places[i]));
	}
	OK(cuStreamSynchronize(stream));
	CHECK(atomic_load(&order_count) == 100);
	for (int i = 0; i < 100; i++)
		CHECK(order[i] == i);
}

static void synchronizing_returns_when_the_work_is_done(void)
{
	CUstream stream;
	uint64_t began;

	begin();
	stream = new_stream(CU_STREAM_NON_BLOCKING);
	began = now_ns();
	launch(stream, 50 * MS);
	CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY);
	OK(cuStreamSynchronize(stream));
	CHECK(now_ns() - began >= 50 * MS);
	OK(cuStreamQuery(stream));
	OK(cuStreamSynchronize(stream));
	launch(stream, 20 * MS);
	launch(NULL, 10 * MS);
	OK(cuCtxSynchronize());
	OK(cuStreamQuery(stream));
	OK(cuStreamQuery(NULL));
}

static void events_tell_the_time_that_work_took(void)
{
	CUdeviceptr memory;
	CUevent at[4], never;
	CUstream stream;
	float ms;

	begin();
	stream = new_stream(CU_STREAM_NON_BLOCKING);
	OK(cuMemAlloc(&memory, 32 * MIB));
	launch(stream, 300 * MS); /* while it runs, all the rest gets into the queue */
	at[0] = new_event(stream);
	launch(stream, 3 * MS);
	at[1] = new_event(stream);
	launch(stream, 7 * MS);
	at[2] = new_event(stream);
	OK(cuMemcpyHtoDAsync(memory, PTX, 27500000, stream));
	at[3] = new_event(stream);
	CHECK(cuEventQuery(at[0]) == CUDA_ERROR_NOT_READY);
	CHECK(cuEventElapsedTime(&ms, at[0], at[1]) == CUDA_ERROR_NOT_READY);
	OK(cuEventSynchronize(at[3]));
	CHECK(MUCH_LIKE(between(at[0], at[1]), 3.0f));
	CHECK(MUCH_LIKE(between(at[1], at[2]), 7.0f));
	CHECK(MUCH_LIKE(between(at[2], at[3]), 0.502f)); /* 27.5 MB at 55 GB/s, and 2 µs */
	CHECK(MUCH_LIKE(between(at[2], at[0]), -10.0f));
	OK(cuEventCreate(&never, CU_EVENT_DEFAULT));
	CHECK(cuEventElapsedTime(&ms, at[0], never) == CUDA_ERROR_INVALID_HANDLE);
	OK(cuEventSynchronize(never));
}

static void a_stream_waits_for_an_event_of_another(void)
{
	CUstream first, second;
	CUevent produced, consumed;

	begin();
	first = new_stream(CU_STREAM_NON_BLOCKING);
	second = new_stream(CU_STREAM_NON_BLOCKING);
	launch(first, 100 * MS);
	produced = new_event(first);
	OK(cuStreamWaitEvent(second, produced, 0));
	launch(second, 5 * MS);
	consumed = new_event(second);
	OK(cuStreamSynchronize(second));
	CHECK(MUCH_LIKE(between(produced, consumed), 5.0f));
}

static void the_null_stream_waits_for_the_others_and_they_for_it(void)
{
	CUstream blocking, free_running;
	CUevent before, within, after, beside;

	begin();
	blocking = new_stream(CU_STREAM_DEFAULT);
	free_running = new_stream(CU_STREAM_NON_BLOCKING);
	launch(blocking, 300 * MS);
	before = new_event(blocking);
	launch(NULL, 20 * MS);
	within = new_event(NULL);
	launch(blocking, 5 * MS);
	after = new_event(blocking);
	launch(free_running, MS);
	beside = new_event(free_running);
	OK(cuCtxSynchronize());
	CHECK(MUCH_LIKE(between(before, within), 20.0f));
	CHECK(MUCH_LIKE(between(within, after), 5.0f));
	CHECK(between(beside, before) > 0);
}

/* ---- processes ---- */

static void a_forked_child_is_not_initialized(void)
{
	CUdeviceptr memory, mine;
	CUstream stream;
	CUcontext context;
	pid_t pid;
	int count;

	begin();
	stream = new_stream(CU_STREAM_NON_BLOCKING);
	OK(cuMemAlloc(&memory, MIB));
	launch(stream, 200 * MS);
	pid = fork();
	if (pid == 0) {
		alarm(DEADLINE_S);
		CHECK(cuInit(0) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuDevicePrimaryCtxRetain(&context, 0) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuCtxSetCurrent(contexts[0]) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(try_launch(stream, 1000) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(try_launch(NULL, 1000) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuStreamSynchronize(stream) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuStreamDestroy(stream) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuCtxSynchronize() == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuMemAlloc(&mine, MIB) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuMemFree(memory) == CUDA_ERROR_NOT_INITIALIZED);
		CHECK(cuMemcpyHtoD(memory, PTX, 16) == CUDA_ERROR_NOT_INITIALIZED);
		_exit(0);
	}
	expect_end(pid);
	CHECK(cuStreamQuery(stream) == CUDA_ERROR_NOT_READY || cuStreamQuery(stream) == CUDA_SUCCESS);
	launch(stream, 1000); /* and the parent never noticed */
	OK(cuStreamSynchronize(stream));
	OK(cuMemFree(memory));
}

static int channel[2];

static void tell(void)
{
	CHECK(write(channel[1], "", 1) == 1);
}

static void hear(void)
{
	char byte;

	CHECK(read(channel[0], &byte, 1) == 1);
}

static void fill_and_wait(void)
{
	CUdeviceptr memory;

	begin();
	OK(cuMemAlloc(&memory, 1024 * MIB));
	launch(NULL, 20 * MS);
	tell();
	for (;;)
		launch(NULL, 1000);
}

static void expect_memory_back(size_t before)
{
	while (free_bytes() != before)
		nap(); /* SIGALRM ends it */
}

static void a_killed_process_gives_its_memory_back(void)
{
	size_t before;
	pid_t pid;

	CHECK(pipe(channel) == 0);
	pid = child(fill_and_wait);
	hear();
	begin();
	CHECK(free_bytes() < 1024 * MIB);
	CHECK(kill(pid, SIGKILL) == 0);
	CHECK(waitpid(pid, NULL, 0) == pid);
	before = 3072 * MIB - 520 * MIB; /* all but our own context */
	expect_memory_back(before);
	launch(NULL, 1000);
	OK(cuCtxSynchronize());
}

static void leave_a_child_behind(void)
{
	CUdeviceptr memory;

	CHECK(setpgid(0, 0) == 0); /* before there is a child, which is in the group too then */
	begin();
	OK(cuMemAlloc(&memory, 1024 * MIB));
	if (fork() == 0) {
		alarm(DEADLINE_S);
		tell();
		pause();
	}
	pause();
}

static void a_killed_process_gives_its_memory_back_although_its_child_lives(void)
{
	pid_t pid;

	CHECK(pipe(channel) == 0);
	pid = child(leave_a_child_behind);
	hear();
	begin();
	CHECK(kill(pid, SIGKILL) == 0);
	CHECK(waitpid(pid, NULL, 0) == pid);
	expect_memory_back(3072 * MIB - 520 * MIB);
	CHECK(kill(-pid, 0) == 0); /* the child is still there */
	CHECK(kill(-pid, SIGKILL) == 0);
}

static void work_without_end(void)
{
	CUdeviceptr memory;

	begin();
	tell();
	for (;;) {
		OK(cuMemAlloc(&memory, MIB));
		for (int i = 0; i < 300; i++)
			launch(NULL, 20000);
		OK(cuMemFree(memory));
	}
}

static void a_stopped_process_blocks_no_other(void)
{
	pid_t pid;
	int status;

	CHECK(pipe(channel) == 0);
	pid = child(work_without_end);
	hear();
	begin();
	for (int round = 0; round < 40; round++) {
		CUdeviceptr memory;

		CHECK(kill(pid, SIGSTOP) == 0);
		CHECK(waitpid(pid, &status, WUNTRACED) == pid && WIFSTOPPED(status));
		OK(cuMemAlloc(&memory, MIB));
		for (int i = 0; i < 20; i++)
			launch(NULL, 1000);
		OK(cuCtxSynchronize()); /* behind what the stopped one has queued, and no longer */
		OK(cuMemFree(memory));
		CHECK(kill(pid, SIGCONT) == 0);
		nanosleep(&(struct timespec){.tv_nsec = 100000 + 37000 * round},
			  NULL); /* another instruction each time */
	}
	CHECK(waitpid(pid, &status, WNOHANG) == 0); /* nor did it fail itself */
	CHECK(kill(pid, SIGKILL) == 0);
	CHECK(waitpid(pid, NULL, 0) == pid);
}

/* ---- a server that dies ---- */

static _Atomic int blocked;
static CUstream long_stream, full_stream;

static void *wait_for_long_work(void *unused)
{
	OK(cuCtxSetCurrent(contexts[0]));
	atomic_fetch_add(&blocked, 1);
	CHECK(cuStreamSynchronize(long_stream) != CUDA_SUCCESS);
	return unused;
}

static void *launch_until_it_fails(void *unused)
{
	OK(cuCtxSetCurrent(contexts[0]));
	atomic_fetch_add(&blocked, 1);
	while (try_launch(full_stream, 3600000 * MS) == CUDA_SUCCESS)
		;
	return unused;
}

static void *allocate_until_it_fails(void *unused)
{
	CUdeviceptr memory;

	OK(cuCtxSetCurrent(contexts[0]));
	atomic_fetch_add(&blocked, 1);
	while (cuMemAlloc(&memory, MIB) == CUDA_SUCCESS && cuMemFree(memory) == CUDA_SUCCESS)
		;
	return unused;
}

static void calls_fail_when_the_server_is_gone(void)
{
	void *(*const work[])(void *) = {wait_for_long_work, launch_until_it_fails, allocate_until_it_fails};
	const char *server = getenv("SERVER_PID");
	CUdeviceptr memory, other;
	pthread_t threads[3];

	CHECK(server);
	begin();
	OK(cuMemAlloc(&memory, MIB));
	long_stream = new_stream(CU_STREAM_NON_BLOCKING);
	full_stream = new_stream(CU_STREAM_NON_BLOCKING);
	launch(long_stream, 3600000 * MS);
	for (int i = 0; i < 3; i++)
		CHECK(pthread_create(&threads[i], NULL, work[i], NULL) == 0);
	while (atomic_load(&blocked) < 3)
		nap();
	for (int i = 0; i < 50; i++)
		nap(); /* likely in the middle of their calls; right whether or not */
	CHECK(kill(atoi(server), SIGKILL) == 0);
	for (int i = 0; i < 3; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	CHECK(cuMemAlloc(&other, MIB) != CUDA_SUCCESS);
	CHECK(cuMemFree(memory) != CUDA_SUCCESS);
	CHECK(try_launch(NULL, 1000) != CUDA_SUCCESS);
	CHECK(cuMemcpyHtoD(memory, PTX, 16) != CUDA_SUCCESS);
	CHECK(cuStreamSynchronize(long_stream) != CUDA_SUCCESS);
	CHECK(cuStreamQuery(long_stream) != CUDA_SUCCESS);
	CHECK(cuCtxSynchronize() != CUDA_SUCCESS);
	CHECK(cuInit(0) != CUDA_SUCCESS);
}

/* ---- memory and devices ---- */

static void memory_runs_out_and_comes_back(void)
{
	CUdeviceptr memory[8], more;
	size_t before;
	int count = 0;

	begin();
	before = free_bytes();
	while (cuMemAlloc(&memory[count], 512 * MIB) == CUDA_SUCCESS)
		count++;
	CHECK(count == 4); /* of 3 GiB, less our own context */
	CHECK(cuMemAlloc(&more, 512 * MIB) == CUDA_ERROR_OUT_OF_MEMORY);
	CHECK(free_bytes() == before - 4 * 512 * MIB);
	OK(cuMemAlloc(&more, MIB)); /* what fits is still given */
	OK(cuMemFree(more));
	while (count)
		OK(cuMemFree(memory[--count]));
	CHECK(free_bytes() == before);
	CHECK(cuMemFree(memory[0]) == CUDA_ERROR_INVALID_VALUE);
}

static void contexts_give_their_memory_back(void)
{
	CUdeviceptr memory;
	CUcontext context;
	size_t before;

	begin();
	before = free_bytes();
	OK(cuDevicePrimaryCtxRetain(&contexts[1], 1));
	OK(cuCtxCreate(&context, 0, 0));
	OK(cuMemAlloc(&memory, 100 * MIB));
	CHECK(free_bytes() == before - 100 * MIB); /* a process pays for its context once */
	OK(cuCtxDestroy(context));
	CHECK(free_bytes() == before);
	OK(cuCtxSetCurrent(contexts[1]));
	CHECK(free_bytes() == 3072 * MIB - 520 * MIB);
}

static char uuids[GPUS][UUID_ROOM];

static void read_uuid(CUdevice device, char text[UUID_ROOM])
{
	CUuuid uuid;
	char *to = text + sprintf(text, "GPU-");

	OK(cuDeviceGetUuid(&uuid, device));
	for (int i = 0; i < 16; i++)
		to += sprintf(to, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x",
			      (unsigned char)uuid.bytes[i]);
}

static const char *visible;
static int wanted[GPUS], wanted_count;

static void see_what_is_wanted(void)
{
	char text[UUID_ROOM];
	int count = 0;

	setenv("CUDA_VISIBLE_DEVICES", visible, 1);
	CHECK(cuInit(0) == (wanted_count ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE));
	if (!wanted_count)
		return;
	OK(cuDeviceGetCount(&count));
	CHECK(count == wanted_count);
	for (int i = 0; i < count; i++) {
		read_uuid(i, text);
		CHECK(strcmp(text, uuids[wanted[i]]) == 0);
	}
}

static void expect_visible(const char *list, int count, int first, int second)
{
	visible = list;
	wanted_count = count;
	wanted[0] = first;
	wanted[1] = second;
	expect_end(child(see_what_is_wanted));
}

static void read_uuids(void)
{
	int count;

	OK(cuInit(0));
	OK(cuDeviceGetCount(&count));
	CHECK(count == GPUS);
	for (int d = 0; d < GPUS; d++) {
		read_uuid(d, uuids[d]);
		CHECK(write(channel[1], uuids[d], sizeof(uuids[d])) == sizeof(uuids[d]));
	}
}

static void visible_devices_are_those_of_the_environment(void)
{
	pid_t pid;

	CHECK(pipe(channel) == 0);
	unsetenv("CUDA_VISIBLE_DEVICES");
	pid = child(read_uuids);
	for (int d = 0; d < GPUS; d++)
		CHECK(read(channel[0], uuids[d], sizeof(uuids[d])) == sizeof(uuids[d]));
	expect_end(pid);
	CHECK(strcmp(uuids[0], uuids[1]) != 0);
	expect_visible("0,1", 2, 0, 1);
	expect_visible("1,0", 2, 1, 0);
	expect_visible("1", 1, 1, 0);
	expect_visible(uuids[1], 1, 1, 0);
	expect_visible("0,7,1", 1, 0, 0); /* nothing after one that does not exist */
	expect_visible("", 0, 0, 0);
	expect_visible("-1", 0, 0, 0);
	expect_visible("nonsense", 0, 0, 0);
}

static void work_on_one_device_leaves_the_other_alone(void)
{
	CUdeviceptr memory;
	CUstream far;

	begin();
	OK(cuDevicePrimaryCtxRetain(&contexts[1], 1));
	OK(cuCtxPushCurrent(contexts[1]));
	far = new_stream(CU_STREAM_NON_BLOCKING);
	OK(cuMemAlloc(&memory, 1024 * MIB));
	launch(far, 3600000 * MS);
	OK(cuCtxPopCurrent(NULL));
	CHECK(free_bytes() == 3072 * MIB - 520 * MIB);
	launch(NULL, 1000);
	OK(cuCtxSynchronize());
	CHECK(cuStreamQuery(far) == CUDA_ERROR_NOT_READY);
}

/* ---- memory of other kinds ---- */

/* The forms of before CUDA 3.2. */
extern CUresult old_alloc(CUdeviceptr_v1 *pointer, unsigned bytes) __asm__("cuMemAlloc");
extern CUresult old_free(CUdeviceptr_v1 pointer) __asm__("cuMemFree");
extern CUresult old_copy(void *to, CUdeviceptr_v1 from, unsigned bytes) __asm__("cuMemcpyDtoH");

static void old_calls_get_pointers_of_32_bits(void)
{
	CUdeviceptr_v1 first, second, third;
	size_t before;
	char byte;

	begin();
	before = free_bytes();
	OK(old_alloc(&first, 100 * (unsigned)MIB));
	OK(old_alloc(&second, 100 * (unsigned)MIB));
	CHECK(second >= first + 100 * MIB);
	CHECK(before - free_bytes() == 200 * MIB);
	OK(old_copy(&byte, second, 1));
	OK(old_free(first));
	OK(old_alloc(&third, 50 * (unsigned)MIB));
	CHECK(third == first);
	OK(cuMemFree(second)); /* the new form takes them too */
	OK(old_free(third));
	CHECK(old_free(third) == CUDA_ERROR_INVALID_VALUE);
	CHECK(free_bytes() == before);
}

static void arrays_hold_memory_and_give_it_back(void)
{
	CUDA_ARRAY_DESCRIPTOR flat = {1024, 4096, CU_AD_FORMAT_FLOAT, 4}, read;
	CUDA_ARRAY3D_DESCRIPTOR deep = {1024, 1024, 16, CU_AD_FORMAT_FLOAT, 1, 0};
	CUmipmappedArray levels;
	CUarray array;
	size_t before;

	begin();
	before = free_bytes();
	OK(cuArrayCreate(&array, &flat));
	CHECK(before - free_bytes() == 64 * MIB);
	OK(cuArrayGetDescriptor(&read, array));
	CHECK(read.Width == 1024 && read.Height == 4096 && read.NumChannels == 4);
	CHECK(cuMemFree((CUdeviceptr)(uintptr_t)array) == CUDA_ERROR_INVALID_VALUE);
	OK(cuArrayDestroy(array));
	OK(cuArray3DCreate(&array, &deep));
	CHECK(before - free_bytes() == 64 * MIB);
	OK(cuArrayDestroy(array));
	OK(cuMipmappedArrayCreate(&levels, &deep, 2));
	CHECK(before - free_bytes() == 64 * MIB + 8 * MIB);
	OK(cuMipmappedArrayDestroy(levels));
	deep.Flags = CUDA_ARRAY3D_LAYERED;
	OK(cuMipmappedArrayCreate(&levels, &deep, 2));
	CHECK(before - free_bytes() == 64 * MIB + 16 * MIB);
	OK(cuMipmappedArrayDestroy(levels));
	CHECK(free_bytes() == before);
}

static void host_memory_is_pinned_once(void)
{
	char *own = aligned_alloc(PAGE, 4 * PAGE);
	CUdeviceptr device;
	void *given;

	begin();
	OK(cuMemHostRegister(own, 4 * PAGE, 0));
	CHECK(cuMemHostRegister(own + PAGE, PAGE, 0) == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
	OK(cuMemHostGetDevicePointer(&device, own + PAGE, 0));
	CHECK(cuMemFreeHost(own) == CUDA_ERROR_INVALID_VALUE);
	OK(cuMemHostUnregister(own));
	CHECK(cuMemHostUnregister(own) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	CHECK(cuMemHostGetDevicePointer(&device, own, 0) == CUDA_ERROR_INVALID_VALUE);
	OK(cuMemAllocHost(&given, PAGE));
	CHECK(cuMemHostUnregister(given) == CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
	OK(cuMemFreeHost(given));
	CHECK(cuMemFreeHost(given) == CUDA_ERROR_INVALID_VALUE);
	free(own);
}

static void a_copy_to_the_host_makes_its_pages_resident(void)
{
	enum { PAGES = 16 };
	unsigned char resident[PAGES];
	CUdeviceptr device;
	char *host = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(host != MAP_FAILED);
	begin();
	OK(cuMemAlloc(&device, MIB));
	host[3 * PAGE] = 'x';
	CHECK(mincore(host, PAGES * PAGE, resident) == 0 && !(resident[5] & 1));
	OK(cuMemcpyDtoH(host, device, 8 * PAGE));
	CHECK(mincore(host, PAGES * PAGE, resident) == 0);
	for (int i = 0; i < PAGES; i++)
		CHECK((resident[i] & 1) == (i < 8));
	CHECK(host[3 * PAGE] == 'x');
}

/* ---- graphs ---- */

static size_t node_count(CUgraph graph)
{
	size_t count = 0;

	OK(cuGraphGetNodes(graph, NULL, &count));
	return count;
}

static CUgraphExec instantiated(CUgraph graph)
{
	CUgraphExec exec;

	OK(cuGraphInstantiate(&exec, graph, 0));
	return exec;
}

static float run_ms(CUgraphExec exec, CUstream stream)
{
	CUevent first, second;

	launch(stream, 200 * MS); /* all that follows is there before it ends */
	first = new_event(stream);
	OK(cuGraphLaunch(exec, stream));
	second = new_event(stream);
	OK(cuEventSynchronize(second));
	return between(first, second);
}

static void a_graph_launches_its_child_graphs_too(void)
{
	unsigned long long ns = 10 * MS;
	void *parameters[] = {&ns};
	CUDA_KERNEL_NODE_PARAMS kernel = {.gridDimX = 1,
					  .gridDimY = 1,
					  .gridDimZ = 1,
					  .blockDimX = 32,
					  .blockDimY = 1,
					  .blockDimZ = 1,
					  .kernelParams = parameters};
	CUgraphNodeParams params = {.type = CU_GRAPH_NODE_TYPE_KERNEL};
	CUgraph child, graph, copy;
	CUgraphExec exec;
	CUgraphNode nodes[4];
	CUgraphExecUpdateResultInfo info;

	begin();
	kernel.func = spin;
	params.kernel = kernel;
	OK(cuGraphCreate(&child, 0));
	OK(cuGraphAddKernelNode(&nodes[0], child, NULL, 0, &kernel));
	OK(cuGraphAddKernelNode(&nodes[1], child, nodes, 1, &kernel));
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddEmptyNode(&nodes[2], graph, NULL, 0));
	OK(cuGraphAddNode(&nodes[2], graph, NULL, 0, &params));
	OK(cuGraphAddChildGraphNode(&nodes[3], graph, &nodes[2], 1, child));
	OK(cuGraphDestroy(child)); /* the graph has a copy */
	CHECK(node_count(graph) == 3);
	exec = instantiated(graph);
	CHECK(MUCH_LIKE(run_ms(exec, new_stream(CU_STREAM_NON_BLOCKING)), 30));
	OK(cuGraphClone(&copy, graph));
	OK(cuGraphExecUpdate(exec, copy, &info));
	OK(cuGraphAddEmptyNode(&nodes[0], copy, NULL, 0));
	OK(cuGraphAddKernelNode(&nodes[0], copy, NULL, 0, &kernel));
	CHECK(cuGraphExecUpdate(exec, copy, &info) == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
	CHECK(info.result == CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
}

static CUDA_KERNEL_NODE_PARAMS kernel_for(void **parameters)
{
	return (CUDA_KERNEL_NODE_PARAMS){.func = spin,
					 .gridDimX = 1,
					 .gridDimY = 1,
					 .gridDimZ = 1,
					 .blockDimX = 32,
					 .blockDimY = 1,
					 .blockDimZ = 1,
					 .kernelParams = parameters};
}

static void a_node_does_what_it_was_set_to_do_last(void)
{
	unsigned long long short_ns = 10 * MS, long_ns = 40 * MS;
	void *brief[] = {&short_ns}, *lengthy[] = {&long_ns};
	CUDA_KERNEL_NODE_PARAMS kernel;
	CUgraph child, graph;
	CUgraphExec exec;
	CUgraphNode nodes[3];
	CUstream stream;

	begin();
	stream = new_stream(CU_STREAM_NON_BLOCKING);
	kernel = kernel_for(brief);
	OK(cuGraphCreate(&child, 0));
	OK(cuGraphAddKernelNode(&nodes[0], child, NULL, 0, &kernel));
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddKernelNode(&nodes[1], graph, NULL, 0, &kernel));
	OK(cuGraphAddChildGraphNode(&nodes[2], graph, NULL, 0, child));
	exec = instantiated(graph);
	kernel = kernel_for(lengthy);
	OK(cuGraphKernelNodeSetParams(nodes[1], &kernel));
	OK(cuGraphKernelNodeSetParams(nodes[0], &kernel));
	CHECK(MUCH_LIKE(run_ms(exec, stream), 20)); /* as it was */
	CHECK(MUCH_LIKE(run_ms(instantiated(graph), stream), 50)); /* the child graph is a copy */
	OK(cuGraphExecKernelNodeSetParams(exec, nodes[1], &kernel));
	OK(cuGraphExecChildGraphNodeSetParams(exec, nodes[2], child));
	CHECK(MUCH_LIKE(run_ms(exec, stream), 80));
	OK(cuGraphNodeSetEnabled(exec, nodes[1], 0));
	CHECK(MUCH_LIKE(run_ms(exec, stream), 40));
	CHECK(cuGraphExecKernelNodeSetParams(exec, nodes[2], &kernel) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuGraphMemsetNodeSetParams(nodes[1], &(CUDA_MEMSET_NODE_PARAMS){0}) == CUDA_ERROR_INVALID_VALUE);
	OK(cuGraphDestroyNode(nodes[2]));
	CHECK(node_count(graph) == 1);
	CHECK(MUCH_LIKE(run_ms(instantiated(graph), stream), 40));
}

static cuuint64_t graph_bytes(CUgraphMem_attribute attribute)
{
	cuuint64_t value;

	OK(cuDeviceGetGraphMemAttribute(0, attribute, &value));
	return value;
}

static void a_graph_has_its_memory_from_its_first_launch_until_it_is_destroyed(void)
{
	CUDA_MEM_ALLOC_NODE_PARAMS memory = {
		.poolProps = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}},
		.bytesize = 4 * MIB};
	CUgraphNode node;
	CUgraph graph;
	CUgraphExec exec;
	CUstream stream;
	size_t before, after, total;
	CUdeviceptr at;

	begin();
	stream = new_stream(CU_STREAM_NON_BLOCKING);
	OK(cuGraphCreate(&graph, 0));
	OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory));
	OK(cuGraphAddMemFreeNode(&node, graph, &node, 1, memory.dptr));
	memory.bytesize = 3 * MIB; /* where the first one was */
	OK(cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory));
	CHECK(cuGraphAddMemFreeNode(&node, graph, NULL, 0, 12345) == CUDA_ERROR_INVALID_VALUE);
	exec = instantiated(graph);
	OK(cuMemGetInfo(&before, &total));
	CHECK(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) == 0);
	for (int i = 0; i < 2; i++) {
		OK(cuGraphLaunch(exec, stream));
		OK(cuMemFreeAsync(memory.dptr, stream));
	}
	OK(cuMemGetInfo(&after, &total));
	CHECK(before - after == 4 * MIB);
	CHECK(graph_bytes(CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT) == 4 * MIB);
	OK(cuGraphExecDestroy(exec));
	OK(cuDeviceGraphMemTrim(0));
	OK(cuMemGetInfo(&after, &total));
	CHECK(before == after && graph_bytes(CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT) == 0);
	CHECK(graph_bytes(CU_GRAPH_MEM_ATTR_USED_MEM_HIGH) == 4 * MIB);
	OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuMemAllocAsync(&at, MIB, stream));
	OK(cuStreamEndCapture(stream, &graph));
	CHECK(node_count(graph) == 1);
	OK(cuMemGetInfo(&after, &total));
	CHECK(before == after);
}

static void a_capture_takes_in_the_streams_that_wait_for_it(void)
{
	CUstream main_stream, side, outside;
	CUevent fork, join;
	CUdeviceptr memory;
	CUgraph graph;
	CUstreamCaptureStatus status;

	begin();
	main_stream = new_stream(CU_STREAM_NON_BLOCKING);
	side = new_stream(CU_STREAM_NON_BLOCKING);
	outside = new_stream(CU_STREAM_NON_BLOCKING);
	OK(cuMemAlloc(&memory, MIB));
	OK(cuStreamBeginCapture(main_stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch(main_stream, 10 * MS);
	fork = new_event(main_stream);
	CHECK(cuEventSynchronize(fork) == CUDA_ERROR_CAPTURED_EVENT);
	OK(cuStreamWaitEvent(side, fork, 0));
	launch(side, 10 * MS);
	OK(cuMemsetD8Async(memory, 0, MIB, side));
	CHECK(cuStreamEndCapture(side, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
	join = new_event(side);
	OK(cuStreamWaitEvent(main_stream, join, 0));
	CHECK(cuStreamWaitEvent(main_stream, new_event(outside), 0) == CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
	OK(cuStreamEndCapture(main_stream, &graph));
	OK(cuStreamIsCapturing(side, &status));
	CHECK(status == CU_STREAM_CAPTURE_STATUS_NONE);
	CHECK(node_count(graph) == 3);
	CHECK(run_ms(instantiated(graph), main_stream) > 20);
	CHECK(cuStreamWaitEvent(side, join, 0) == CUDA_ERROR_CAPTURED_EVENT);
}

static void a_capture_that_is_not_joined_is_an_error(void)
{
	CUstream main_stream, side;
	CUgraph graph;

	begin();
	main_stream = new_stream(CU_STREAM_NON_BLOCKING);
	side = new_stream(CU_STREAM_NON_BLOCKING);
	OK(cuStreamBeginCapture(main_stream, CU_STREAM_CAPTURE_MODE_RELAXED));
	OK(cuStreamWaitEvent(side, new_event(main_stream), 0));
	launch(side, MS);
	CHECK(cuStreamEndCapture(main_stream, &graph) == CUDA_ERROR_STREAM_CAPTURE_UNJOINED);
	CHECK(!graph);
	launch(side, 1); /* an ordinary stream again */
	OK(cuCtxSynchronize());
}

static void a_graph_that_is_captured_again_does_what_was_captured_last(void)
{
	CUstream stream;
	CUdeviceptr memory;
	CUgraph graph, ended;

	begin();
	stream = new_stream(CU_STREAM_NON_BLOCKING);
	OK(cuMemAlloc(&memory, MIB));
	OK(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
	launch(stream, 100 * MS);
	OK(cuStreamEndCapture(stream, &graph));
	OK(cuStreamBeginRecaptureToGraph(stream, CU_STREAM_CAPTURE_MODE_GLOBAL, graph, NULL, NULL));
	CHECK(cuMemsetD8Async(memory, 0, MIB, stream) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
	launch(stream, 10 * MS);
	OK(cuStreamEndCapture(stream, &ended));
	CHECK(ended == graph && node_count(graph) == 1);
	CHECK(MUCH_LIKE(run_ms(instantiated(graph), stream), 10));
}

/* ---- mistakes ---- */

static void mistakes_are_errors(void)
{
	CUdeviceptr memory;
	CUfunction function;
	CUcontext context;
	CUmodule module;
	int count;

	CHECK(cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED);
	CHECK(cuMemAlloc(&memory, MIB) == CUDA_ERROR_NOT_INITIALIZED);
	CHECK(cuInit(1) == CUDA_ERROR_INVALID_VALUE);
	OK(cuInit(0));
	CHECK(cuMemAlloc(&memory, MIB) == CUDA_ERROR_INVALID_CONTEXT);
	CHECK(cuDevicePrimaryCtxRetain(&context, GPUS) == CUDA_ERROR_INVALID_DEVICE);
	begin();
	CHECK(cuMemAlloc(&memory, 0) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuMemFree(12345) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuLaunchKernel(NULL, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == CUDA_ERROR_INVALID_HANDLE);
	CHECK(cuLaunchKernel(spin, 0, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuLaunchKernel(spin, 1, 1, 1, 1025, 1, 1, 0, NULL, NULL, NULL) == CUDA_ERROR_INVALID_VALUE);
	CHECK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == CUDA_ERROR_INVALID_VALUE);
	OK(cuModuleLoadData(&module, PTX));
	CHECK(cuModuleGetFunction(&function, module, "absent") == CUDA_ERROR_NOT_FOUND);
	OK(cuCtxSynchronize());
}

static void images_that_no_driver_loads_are_errors(void)
{
	static const char not_for_gpus[64] = "\x7f"
					     "ELF\2\1\1";
	CUmodule module;

	begin();
	CHECK(cuModuleLoadData(&module, not_for_gpus) == CUDA_ERROR_INVALID_IMAGE);
	CHECK(cuModuleLoadData(&module, "\1\2\3") == CUDA_ERROR_INVALID_IMAGE);
	CHECK(cuModuleLoadData(&module, "int main() { return 0; }") == CUDA_ERROR_INVALID_PTX);
	CHECK(cuModuleLoadData(&module, ".visible .entry headless() { ret; }") == CUDA_ERROR_INVALID_PTX);
	CHECK(cuModuleLoadData(&module, ".version 7.0\n.target sm_100\n") == CUDA_ERROR_INVALID_PTX);
	CHECK(cuModuleLoadData(&module, ".version 8.8\n.target sm_90\n") == CUDA_ERROR_UNSUPPORTED_PTX_VERSION);
	OK(cuModuleLoadData(&module, "// of CUDA 12.8\n.version 8.7\n.target sm_90a\n"));
}

static void a_launch_gets_no_more_shared_memory_than_its_function_allows(void)
{
	unsigned long long ns = 1;
	void *params[] = {&ns};
	int bytes, blocks, threads;

	begin();
	OK(cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, spin));
	CHECK(bytes == 48 << 10);
	OK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, (unsigned)bytes, NULL, params, NULL));
	CHECK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, (unsigned)bytes + 1, NULL, params, NULL) ==
	      CUDA_ERROR_INVALID_VALUE);
	OK(cuFuncSetAttribute(spin, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes + 1));
	OK(cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, (unsigned)bytes + 1, NULL, params, NULL));
	CHECK(cuFuncSetAttribute(spin, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1 << 20) ==
	      CUDA_ERROR_INVALID_VALUE);
	OK(cuOccupancyMaxPotentialBlockSize(&blocks, &threads, spin, NULL, 0, 0));
	CHECK(blocks == 2 * 4 && threads == 1024);
	OK(cuCtxSynchronize());
}

static void a_pointer_is_known_by_the_memory_that_it_lies_in(void)
{
	CUdeviceptr memory, base, outside = 0x1000;
	size_t bytes;
	void *host;
	unsigned type;
	bool managed;
	CUpointer_attribute wanted[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE};
	void *data[] = {&type};

	begin();
	OK(cuMemAllocManaged(&memory, MIB, CU_MEM_ATTACH_GLOBAL));
	OK(cuMemGetAddressRange(&base, &bytes, memory + 7));
	CHECK(base == memory && bytes == MIB);
	OK(cuPointerGetAttribute(&managed, CU_POINTER_ATTRIBUTE_IS_MANAGED, memory + MIB - 1));
	CHECK(managed);
	OK(cuMemFree(memory));
	CHECK(cuMemGetAddressRange(&base, &bytes, memory) == CUDA_ERROR_NOT_FOUND);
	OK(cuMemHostAlloc(&host, MIB, 0));
	OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (CUdeviceptr)host));
	CHECK(type == CU_MEMORYTYPE_HOST);
	CHECK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, outside) == CUDA_ERROR_INVALID_VALUE);
	OK(cuPointerGetAttributes(1, wanted, data, outside));
	CHECK(type == 0);
	OK(cuMemFreeHost(host));
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
	TEST(a_full_queue_blocks_and_goes_on),
	TEST(a_full_queue_blocks_no_other_stream),
	TEST(a_stream_keeps_its_order),
	TEST(synchronizing_returns_when_the_work_is_done),
	TEST(events_tell_the_time_that_work_took),
	TEST(a_stream_waits_for_an_event_of_another),
	TEST(the_null_stream_waits_for_the_others_and_they_for_it),
	TEST(a_forked_child_is_not_initialized),
	TEST(a_killed_process_gives_its_memory_back),
	TEST(a_killed_process_gives_its_memory_back_although_its_child_lives),
	TEST(a_stopped_process_blocks_no_other),
	TEST(calls_fail_when_the_server_is_gone),
	TEST(memory_runs_out_and_comes_back),
	TEST(contexts_give_their_memory_back),
	TEST(visible_devices_are_those_of_the_environment),
	TEST(work_on_one_device_leaves_the_other_alone),
	TEST(old_calls_get_pointers_of_32_bits),
	TEST(arrays_hold_memory_and_give_it_back),
	TEST(host_memory_is_pinned_once),
	TEST(a_copy_to_the_host_makes_its_pages_resident),
	TEST(a_graph_launches_its_child_graphs_too),
	TEST(a_node_does_what_it_was_set_to_do_last),
	TEST(a_graph_has_its_memory_from_its_first_launch_until_it_is_destroyed),
	TEST(a_capture_takes_in_the_streams_that_wait_for_it),
	TEST(a_capture_that_is_not_joined_is_an_error),
	TEST(a_graph_that_is_captured_again_does_what_was_captured_last),
	TEST(mistakes_are_errors),
	TEST(images_that_no_driver_loads_are_errors),
	TEST(a_launch_gets_no_more_shared_memory_than_its_function_allows),
	TEST(a_pointer_is_known_by_the_memory_that_it_lies_in),
};

int main(int argc, char **argv)
{
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
