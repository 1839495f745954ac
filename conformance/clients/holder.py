# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance.clients.holder --library L --bytes N`: device memory with a pattern in it, and what is asked
of it.

Prints `{"ready": true}`, or `{"error": NAME}` and ends; then answers each line of its standard input with one of JSON:

    check       {"wrong": chunks of device and pinned memory that are not what they were, "ms": …}
    step        a launch, the graph if there is one, and a wait: {"wrong": numbers, "ms": …}
    busy US N   N launches of US µs, queued: {"queued": N}
    wait        until all of it has ended: {"ms": …}
    fill LEAVE  takes what is free until it is less than so many bytes: {"free": bytes}; drop gives it back
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import sys
import time
from collections.abc import Sequence

from conformance.clients.driver import CudaError, Gpu, Sequences

CHUNK_BYTES = 1 << 24
_STEP_NS = 200_000
_IN_GRAPH = 4
_LEAST_PIECE = 1 << 21
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def pattern(number: int, size: int) -> bytes:
    """The content of that chunk: no two are alike."""
    digest = hashlib.sha256(number.to_bytes(8, "little")).digest()
    return (digest * (size // len(digest) + 1))[:size]


class Holder:
    """The memory, the launches, and the commands."""

    def __init__(self, gpu: Gpu, device_bytes: int, pinned_bytes: int, graph: bool) -> None:
        self._gpu, self._bytes = gpu, device_bytes
        self._memory = gpu.allocate(device_bytes) if device_bytes else None
        self._pinned = gpu.pinned(pinned_bytes) if pinned_bytes else None
        self._work = Sequences(gpu, _STEP_NS, gpu.multiprocessors, 1024)
        self._graph = self._work.captured(_IN_GRAPH) if graph else None
        self._busy: dict[int, Sequences] = {}
        self._filled: list[ctypes.c_uint64] = []
        for number, address, size in self._chunks():
            gpu.write(address, pattern(number, size))
        if self._pinned is not None:
            ctypes.memmove(self._pinned, pattern(-1 % (1 << 32), pinned_bytes), pinned_bytes)

    def answer(self, words: Sequence[str]) -> dict[str, object]:
        """Executes one command; its answer. CudaError."""
        begun = time.monotonic_ns()
        answer = self._done(words[0], [int(word) for word in words[1:]])
        return {**answer, "ms": (time.monotonic_ns() - begun) / 1e6}

    def _done(self, command: str, numbers: Sequence[int]) -> dict[str, object]:
        if command == "check":
            return {"wrong": self._wrong()}
        if command == "step":
            return {"wrong": self._step()}
        if command == "busy":
            return {"queued": self._queue(*numbers)}
        if command == "fill":
            return {"free": self._fill(*numbers)}
        if command == "drop":
            while self._filled:
                self._gpu.free(self._filled.pop())
        if command == "wait":
            self._gpu.wait()
        return {}

    def _chunks(self) -> list[tuple[int, int, int]]:
        if self._memory is None:
            return []
        begun = self._memory.value
        starts = range(0, self._bytes, CHUNK_BYTES)
        return [(at, begun + start, min(CHUNK_BYTES, self._bytes - start)) for at, start in enumerate(starts)]

    def _wrong(self) -> int:
        wrong = 0
        for number, address, size in self._chunks():
            held = (ctypes.c_char * size)()
            self._gpu.read(address, held)
            wrong += held.raw != pattern(number, size)
        if self._pinned is not None:
            wrong += self._pinned.raw != pattern(-1 % (1 << 32), len(self._pinned))
        return wrong

    def _step(self) -> int:
        self._work.launch()
        if self._graph is not None:
            self._work.replayed(self._graph, _IN_GRAPH)
        return self._work.wrong()

    def _queue(self, us: int, count: int) -> int:
        if us not in self._busy:
            self._busy[us] = Sequences(self._gpu, us * 1000, self._gpu.multiprocessors, 1024, self._work.pace)
        for _ in range(count):
            self._busy[us].launch()
        return count

    def _fill(self, leave: int) -> int:
        """In smaller and smaller pieces: a driver does not give all that it says is free, nor in one."""
        piece = free = self._gpu.free_bytes()
        while free >= leave and piece >= _LEAST_PIECE:
            piece = min(piece, free - leave // 2)
            try:
                self._filled.append(self._gpu.allocate(piece))
            except CudaError as error:
                if error.code != _OUT_OF_MEMORY:
                    raise
                piece //= 2
            free = self._gpu.free_bytes()
        return free


def main() -> int:
    """0 when the input has ended, 3 when the start failed."""
    parser = argparse.ArgumentParser(prog="python -m conformance.clients.holder", description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--bytes", type=int, default=0)
    parser.add_argument("--pinned", type=int, default=0)
    parser.add_argument("--graph", action="store_true")
    options = parser.parse_args()
    try:
        holder = Holder(Gpu(options.library), options.bytes, options.pinned, options.graph)
    except CudaError as error:
        _say({"error": error.name})
        return 3
    _say({"ready": True})
    for line in sys.stdin:
        try:
            _say(holder.answer(line.split()))
        except CudaError as error:
            _say({"error": error.name})
    return 0


def _say(record: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
