# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance.clients.steps --library L`: kernels without end, and when each was launched and ended.

Prints `{"ready": true, …}`, works until SIGTERM or a CUDA error, and then prints what happened: times are those of
CLOCK_MONOTONIC in ns, a kernel's end by the device's own clock, so that it is right for kernels too that ended while
this process stood still. `wrong` counts numbers that the kernels left elsewhere than they must be.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import Final

from conformance.clients.driver import CudaError, Gpu, Sequences

_MORE_MARKS: Final = 4
_ended = False


@dataclass
class Times:
    """Host times of launches, device times of ends."""

    launched_ns: list[int] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)  # since the first mark


def main() -> int:
    """0, or 3 after a CUDA error, which is reported."""
    options = parser().parse_args()
    if not options.default_signals:
        signal.signal(signal.SIGTERM, _on_term)
    times, error = Times(), None
    summary: dict[str, object] = {}
    try:
        gpu = Gpu(options.library)
        blocks = options.blocks or gpu.multiprocessors * options.waves
        work = Sequences(gpu, int(options.kernel_us * 1000), blocks, options.threads, options.iterations_per_us)
        _say({"ready": True, "blocks": blocks, "multiprocessors": gpu.multiprocessors, "iterations_per_us": work.pace})
        summary = _worked(gpu, work, times, options.queue, options.drain)
    except CudaError as failure:
        error = failure.name
    _say({"launched_ns": times.launched_ns, "error": error, "failed_ns": time.monotonic_ns(), **summary})
    return 3 if error else 0


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(prog="python -m conformance.clients.steps", description=__doc__)
    made.add_argument("--library", required=True)
    made.add_argument("--kernel-us", type=float, default=1000.0)
    made.add_argument("--queue", type=int, default=16, help="most kernels at once")
    made.add_argument("--drain", type=int, default=0, help="wait for all after so many, --queue at most; 0: never")
    made.add_argument("--blocks", type=int, default=0, help="0: as many as there are multiprocessors, --waves times")
    made.add_argument("--waves", type=int, default=1)
    made.add_argument("--threads", type=int, default=1024)
    made.add_argument("--iterations-per-us", type=int, default=0, help="of a block; 0: measured, on an idle device")
    made.add_argument("--default-signals", action="store_true", help="SIGTERM ends it on the spot")
    return made


def _on_term(number: int, frame: object) -> None:
    global _ended
    _ended = True


def _worked(gpu: Gpu, work: Sequences, times: Times, queue: int, drain: int) -> dict[str, object]:
    """Until SIGTERM. Two marks, before and after all work, tell how the device's clock and ours go together."""
    first, last, events = gpu.event(), gpu.event(), [gpu.event() for _ in range(queue)]
    begun_ns = _marked_ns(gpu, first)
    while not _ended:
        event = events[work.launches % queue]
        if work.launches >= queue:
            if not drain:
                gpu.wait_for(event)
            times.ended.append(gpu.between_ns(first, event))
        work.launch()
        gpu.mark(event)
        times.launched_ns.append(time.monotonic_ns())
        if drain and work.launches % drain == 0:
            gpu.wait()
    gpu.wait()
    rest = min(queue, work.launches)
    for number in range(work.launches - rest, work.launches):
        times.ended.append(gpu.between_ns(first, events[number % queue]))
    ended_ns = _marked_ns(gpu, last)
    pace = (ended_ns - begun_ns) / max(1.0, gpu.between_ns(first, last))
    return {"ended_ns": [begun_ns + round(at * pace) for at in times.ended], "wrong": work.wrong()}


def _marked_ns(gpu: Gpu, event: ctypes.c_void_p) -> int:
    """When the device took the mark, which may have waited for a slice of another process.

    By the promptest of a few waits, each less the device's time since the mark.
    """
    returned_ns = []
    for mark in (event, *(gpu.event() for _ in range(_MORE_MARKS))):
        gpu.mark(mark)
        gpu.wait()
        returned_ns.append(time.monotonic_ns() - gpu.between_ns(event, mark))
    return round(min(returned_ns))


def _say(record: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
