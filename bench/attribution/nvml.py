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
    with suppress(pynvml.NVMLError_NotFound):  # no process has been active
        found = pynvml.nvmlDeviceGetProcessUtilization(handle, since_us)
        return [(int(s.timeStamp), int(s.pid), s.smUtil / 100) for s in found if s.smUtil <= 100]
    return []


def _instances(gpu: Any) -> Iterator[Any]:
    with suppress(pynvml.NVMLError_NotSupported):
        for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
            with suppress(pynvml.NVMLError_NotFound):
                yield pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index)


def _devices() -> Iterator[tuple[str, Any, bool]]:
    """UUID and handle of each GPU and MIG instance, and whether NVML has utilisation by process: not where MIG is."""
    for index in range(pynvml.nvmlDeviceGetCount()):
        gpu = pynvml.nvmlDeviceGetHandleByIndex(index)
        instances = list(_instances(gpu))
        yield pynvml.nvmlDeviceGetUUID(gpu), gpu, not instances
        yield from ((pynvml.nvmlDeviceGetUUID(instance), instance, False) for instance in instances)


def main() -> None:
    """Polls until it is killed."""
    pynvml.nvmlInit()
    devices = list(_devices())
    newest_us = dict.fromkeys((uuid for uuid, _, _ in devices), time.time_ns() // 1000 - _FIRST_LOOK_US)
    while True:
        for uuid, handle, has_samples in devices:
            samples = _samples(handle, newest_us[uuid]) if has_samples else []
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
