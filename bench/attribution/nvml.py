# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench.attribution.nvml`: what NVML alone tells a monitoring tool, a line of JSON per device and second.

A process of its own, because NVML finds its GPUs by the environment that a process starts with.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import pynvml

INTERVAL_SECONDS: Final = 1.0
_FIRST_LOOK_US: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Listing:
    """One device at one time: who NVML lists, and the utilisation samples that are new, as (wall µs, tgid, ratio)."""

    at_ns: int  # CLOCK_MONOTONIC
    device: str  # its UUID
    tgids: tuple[int, ...]
    samples: tuple[tuple[int, int, float], ...]


def parse(text: str) -> list[Listing]:
    """What this program wrote; a last line that is cut off is left out."""
    rows = [json.loads(line) for line in text.split("\n")[:-1]]
    return [
        Listing(row["at_ns"], row["device"], tuple(row["tgids"]), tuple((w, t, r) for w, t, r in row["samples"]))
        for row in rows
    ]


def _tgids(handle: Any) -> Iterator[int]:
    for listed in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetMPSComputeRunningProcesses):
        yield from (int(process.pid) for process in listed(handle))


def _samples(handle: Any, since_us: int) -> list[tuple[int, int, float]]:
    # No process has been active; and nothing is counted for each process where a GPU is divided.
    with suppress(pynvml.NVMLError_NotFound, pynvml.NVMLError_NotSupported):
        found = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
        return [(int(s.timeStamp), int(s.pid), s.smUtil / 100) for s in found if s.smUtil <= 100]
    return []


def _devices() -> Iterator[Any]:
    """GPUs, and the MIG instances of those that are divided."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        yield gpu
        with suppress(pynvml.NVMLError_NotSupported):
            for instance in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
                with suppress(pynvml.NVMLError_NotFound):
                    yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, instance)


def main() -> None:
    """Polls until it is killed."""
    pynvml.nvmlInit()
    handles = {pynvml.nvmlDeviceGetUUID(handle): handle for handle in _devices()}
    newest_us = dict.fromkeys(handles, time.time_ns() // 1000 - _FIRST_LOOK_US)
    while True:
        for uuid, handle in handles.items():
            samples = _samples(handle, newest_us[uuid])
            newest_us[uuid] = max([newest_us[uuid], *(stamp for stamp, _, _ in samples)])
            row = {
                "at_ns": time.monotonic_ns(),
                "device": uuid,
                "tgids": sorted(set(_tgids(handle))),
                "samples": samples,
            }
            print(json.dumps(row), flush=True)
        time.sleep(INTERVAL_SECONDS)


if __name__ == "__main__":
    main()
