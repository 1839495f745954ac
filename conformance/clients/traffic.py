# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance.clients.traffic --library L`: one kind of work for a while, as fast as it goes.

Prints `{"ready": true, …}`, then answers each line `KIND MS` of its standard input with one of JSON:
`{"per_second": …}`, how often it was done, or `{"error": NAME}`. Kinds: `half` and `full`, kernels on half of the SMs
and on all; `to_device`, `to_host`, copies of pinned memory; `on_device`, copies within the device.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable

from conformance.clients.driver import CudaError, Gpu, Sequences

_KERNEL_NS = 200_000
_THREADS = 1024
_QUEUE = 4
_COPY_BYTES = 1 << 25
_ON_DEVICE_BYTES = 1 << 28


class Traffic:
    """The memory, and what each kind queues."""

    def __init__(self, gpu: Gpu, pace: int) -> None:
        self._gpu = gpu
        blocks = max(1, gpu.multiprocessors // 2)
        half = Sequences(gpu, _KERNEL_NS, blocks, _THREADS, pace)
        full = Sequences(gpu, _KERNEL_NS, gpu.multiprocessors, _THREADS, half.pace)
        self.pace = half.pace
        self._host = gpu.pinned(_COPY_BYTES)
        self._first, self._second = (gpu.allocate(_ON_DEVICE_BYTES) for _ in range(2))
        self._events = [gpu.event() for _ in range(_QUEUE)]
        self._acts: dict[str, Callable[[], None]] = {
            "half": half.launch,
            "full": full.launch,
            "to_device": lambda: self._copy("cuMemcpyHtoDAsync_v2", self._first, self._host, _COPY_BYTES),
            "to_host": lambda: self._copy("cuMemcpyDtoHAsync_v2", self._host, self._first, _COPY_BYTES),
            "on_device": lambda: self._copy("cuMemcpyDtoDAsync_v2", self._second, self._first, _ON_DEVICE_BYTES),
        }

    def per_second(self, kind: str, seconds: float) -> float:
        """How often it was done, with a few queued at any time. CudaError; KeyError for another kind."""
        act = self._acts[kind]
        begun, count = time.monotonic(), 0
        while time.monotonic() - begun < seconds:
            event = self._events[count % _QUEUE]
            if count >= _QUEUE:
                self._gpu.wait_for(event)
            act()
            self._gpu.mark(event)
            count += 1
        self._gpu.wait()
        return count / (time.monotonic() - begun)

    def _copy(self, call: str, to: object, origin: object, size: int) -> None:
        self._gpu.cuda.call(call, to, origin, ctypes.c_size_t(size), self._gpu.stream)


def main() -> int:
    """0, or 3 where the GPU could not be had."""
    parser = argparse.ArgumentParser(prog="python -m conformance.clients.traffic", description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--iterations-per-us", type=int, default=0, help="of a block; 0: measured, on an idle device")
    options = parser.parse_args()
    try:
        traffic = Traffic(Gpu(options.library), options.iterations_per_us)
    except CudaError as failure:
        print(json.dumps({"error": failure.name}), flush=True)
        return 3
    print(json.dumps({"ready": True, "iterations_per_us": traffic.pace}), flush=True)
    for line in sys.stdin:
        kind, ms = line.split()
        try:
            answer: dict[str, object] = {"per_second": traffic.per_second(kind, int(ms) / 1e3)}
        except CudaError as failure:
            answer = {"error": failure.name}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
