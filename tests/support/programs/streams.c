/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * A program that works in several streams, by the operations that its arguments name. Streams and events are numbered
 * from 1; stream 0 is the legacy default stream, 9 the thread's own (CU_STREAM_PER_THREAD).
 *
 *   stream:S:FLAGS destroy:S                    1: CU_STREAM_NON_BLOCKING
 *   launch:S:NS copy:S:BYTES                    a kernel that takes so long; a copy to the device that returns at once
 *   record:E:S join:S:E                         cuEventRecord; the stream waits for the event
 *   wait:S event:E context query:S block        waits: for a stream, an event, all; a loop of queries; a copy that blocks
 *   begin:S end:S replay:S                      a capture, what it became, its launch into the stream
 *   sleep:MS
 *
 * It prints "ready", waits for a line, does them, prints "done", and ends at the end of its input.
 */
#include <cuda.h>
#include <ptx.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MOST = 8, PER_THREAD = 9, BUFFER = 1 << 20 };

static const char PTX[] = PTX_HEAD ".visible .entry work(.param .u64 spin_ns) { ret; }\n";

static CUfunction function;
static CUdeviceptr memory;
static char host[BUFFER];
static CUstream streams[MOST];
static CUevent events[MOST];
static CUgraphExec captured;

static void check(CUresult result, const char *what)
{
	if (result == CUDA_SUCCESS)
		return;
	fprintf(stderr, "streams: %s: error %d\n", what, (int)result);
	exit(1);
}

static CUstream stream(unsigned long number)
{
	return number == PER_THREAD ? CU_STREAM_PER_THREAD : number ? streams[number % MOST] : NULL;
}

static CUevent event(unsigned long number)
{
	CUevent *made = &events[number % MOST];

	if (!*made)
		check(cuEventCreate(made, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
	return *made;
}

static void launch(CUstream where, unsigned long ns)
{
	void *parameters[] = {&ns};

	check(cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, where, parameters, NULL), "cuLaunchKernel");
}

static void poll_stream(CUstream where)
{
	CUresult result;

	while ((result = cuStreamQuery(where)) == CUDA_ERROR_NOT_READY)
		usleep(100);
	check(result, "cuStreamQuery");
}

static void end(CUstream where)
{
	CUgraph graph;

	check(cuStreamEndCapture(where, &graph), "cuStreamEndCapture");
	check(cuGraphInstantiate(&captured, graph, 0), "cuGraphInstantiate");
}

static void carry_out(const char *name, unsigned long first, unsigned long second)
{
	if (strcmp(name, "stream") == 0)
		check(cuStreamCreate(&streams[first % MOST], (unsigned)second), "cuStreamCreate");
	else if (strcmp(name, "destroy") == 0)
		check(cuStreamDestroy(stream(first)), "cuStreamDestroy");
	else if (strcmp(name, "launch") == 0)
		launch(stream(first), second);
	else if (strcmp(name, "copy") == 0)
		check(cuMemcpyHtoDAsync(memory, host, second, stream(first)), "cuMemcpyHtoDAsync");
	else if (strcmp(name, "record") == 0)
		check(cuEventRecord(event(first), stream(second)), "cuEventRecord");
	else if (strcmp(name, "join") == 0)
		check(cuStreamWaitEvent(stream(first), event(second), 0), "cuStreamWaitEvent");
	else if (strcmp(name, "wait") == 0)
		check(cuStreamSynchronize(stream(first)), "cuStreamSynchronize");
	else if (strcmp(name, "event") == 0)
		check(cuEventSynchronize(event(first)), "cuEventSynchronize");
	else if (strcmp(name, "context") == 0)
		check(cuCtxSynchronize(), "cuCtxSynchronize");
	else if (strcmp(name, "query") == 0)
		poll_stream(stream(first));
	else if (strcmp(name, "block") == 0)
		check(cuMemcpyHtoD(memory, host, 64), "cuMemcpyHtoD");
	else if (strcmp(name, "begin") == 0)
		check(cuStreamBeginCapture(stream(first), CU_STREAM_CAPTURE_MODE_RELAXED), "cuStreamBeginCapture");
	else if (strcmp(name, "end") == 0)
		end(stream(first));
	else if (strcmp(name, "replay") == 0)
		check(cuGraphLaunch(captured, stream(first)), "cuGraphLaunch");
	else if (strcmp(name, "sleep") == 0)
		usleep(first * 1000);
	else {
		fprintf(stderr, "streams: no such operation: %s\n", name);
		exit(2);
	}
}

int main(int argc, char **argv)
{
	CUcontext context;
	CUmodule module;

	puts("ready");
	fflush(stdout);
	if (getchar() == EOF)
		return 1;
	check(cuInit(0), "cuInit");
	check(cuCtxCreate(&context, 0, 0), "cuCtxCreate");
	check(cuModuleLoadData(&module, PTX), "cuModuleLoadData");
	check(cuModuleGetFunction(&function, module, "work"), "cuModuleGetFunction");
	check(cuMemAlloc(&memory, BUFFER), "cuMemAlloc");
	for (int i = 1; i < argc; i++) {
		char name[32] = "";
		unsigned long first = 0, second = 0;

		sscanf(argv[i], "%31[^:]:%lu:%lu", name, &first, &second);
		carry_out(name, first, second);
	}
	puts("done");
	fflush(stdout);
	while (getchar() != EOF)
		;
	return 0;
}
