/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The GPU Warden authors */
/*
 * Locking, saving and restoring another process. The caller needs neither cuInit nor a device: it asks the server, on a
 * connection of its own for each question, and waits for the answer as long as that takes.
 */
#include "internal.h"

#include <stdlib.h>
#include <unistd.h>

#include "query.h"

static CUresult ask(int pid, enum checkpoint_op op, uint64_t limit_ms, int *value)
{
	struct query query = {.op = Q_CHECKPOINT, .a = (uint64_t)pid, .b = op, .c = limit_ms};
	struct answer answer = {.status = 0};
	void *items = NULL;
	CUresult result = CUDA_ERROR_NOT_INITIALIZED;
	int fd;

	if (pid <= 0)
		return CUDA_ERROR_INVALID_VALUE;
	fd = query_connect_as(HELLO_NVML);
	if (fd < 0)
		return result;
	if (query_ask(fd, &query, &answer, &items) && !answer.status && answer.count == 1) {
		const struct checkpoint_reply *reply = items;

		result = (CUresult)reply->result;
		if (value && result == CUDA_SUCCESS)
			*value = (int)reply->value;
	}
	free(items);
	close(fd);
	return result;
}

static bool is_zero(const cuuint64_t *words, size_t count)
{
	while (count && !words[count - 1])
		count--;
	return count == 0;
}

API cuCheckpointProcessGetRestoreThreadId(int pid, int *tid)
{
	return tid ? ask(pid, CHECKPOINT_THREAD, 0, tid) : CUDA_ERROR_INVALID_VALUE;
}

API cuCheckpointProcessGetState(int pid, CUprocessState *state)
{
	int value = 0;
	CUresult result = state ? ask(pid, CHECKPOINT_STATE, 0, &value) : CUDA_ERROR_INVALID_VALUE;

	if (result == CUDA_SUCCESS)
		*state = (CUprocessState)value;
	return result;
}

API cuCheckpointProcessLock(int pid, CUcheckpointLockArgs *args)
{
	if (args && (args->reserved0 || !is_zero(args->reserved1, 7)))
		return CUDA_ERROR_INVALID_VALUE;
	return ask(pid, CHECKPOINT_LOCK, args ? args->timeoutMs : 0, NULL);
}

API cuCheckpointProcessCheckpoint(int pid, CUcheckpointCheckpointArgs *args)
{
	if (args && !is_zero(args->reserved, 8))
		return CUDA_ERROR_INVALID_VALUE;
	return ask(pid, CHECKPOINT_SAVE, 0, NULL);
}

API cuCheckpointProcessRestore(int pid, CUcheckpointRestoreArgs *args)
{
	if (args && !is_zero(args->reserved, 8))
		return CUDA_ERROR_INVALID_VALUE;
	return ask(pid, CHECKPOINT_RESTORE, 0, NULL);
}

API cuCheckpointProcessUnlock(int pid, CUcheckpointUnlockArgs *args)
{
	if (args && !is_zero(args->reserved, 8))
		return CUDA_ERROR_INVALID_VALUE;
	return ask(pid, CHECKPOINT_UNLOCK, 0, NULL);
}
