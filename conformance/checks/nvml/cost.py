# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the agent's reading of NVML costs: its own code on a binding that takes the time of every call."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Final

from agent.core.model import DeviceReading
from agent.nvml.client import Nvml

ONCE: Final = frozenset({"nvmlInit", "nvmlShutdown", "nvmlEventSetCreate", "nvmlEventSetFree", "nvmlGpmSampleAlloc"})


class TimedBinding:
    """The binding, with the duration of each of its calls in ns. Thread-safe: the agent asks for PCIe on a thread."""

    def __init__(self, api: Any) -> None:
        self._api = api
        self._lock = threading.Lock()
        self.durations_ns: defaultdict[str, list[int]] = defaultdict(list)

    def __dir__(self) -> list[str]:
        """The agent looks for names of errors."""
        return dir(self._api)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._api, name)
        timed = callable(value) and name.startswith("nvml") and not isinstance(value, type)
        return self._timing(name, value) if timed else value

    def _timing(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begun_ns = time.perf_counter_ns()
            try:
                return call(*arguments)
            finally:
                with self._lock:
                    self.durations_ns[name].append(time.perf_counter_ns() - begun_ns)

        return timed


@dataclass(frozen=True, slots=True)
class Cost:
    """Of the agent's ticks on the first device. `calls_ms`: of one call, median; `per_tick`: calls of it in a tick."""

    tick_ms: float
    calls_ms: Mapping[str, float]
    per_tick: Mapping[str, float]
    errors: Mapping[str, int]  # as the agent counts them
    readings: tuple[DeviceReading, ...] = field(repr=False)
    mps_clients: frozenset[int] = frozenset()


def measure(api: Any, ticks: int, interval: float) -> Cost:
    """As the agent's collector does it, so often. SetupError where NVML does not start."""
    timed = TimedBinding(api)
    lengths: list[float] = []
    readings: list[DeviceReading] = []
    clients: frozenset[int] = frozenset()
    with Nvml(timed) as nvml:
        _tick(nvml)  # finds the devices, and what they do not support
        timed.durations_ns.clear()
        for _ in range(ticks):
            time.sleep(interval)
            begun = time.perf_counter()
            reading, clients = _tick(nvml)
            lengths.append((time.perf_counter() - begun) * 1e3)
            readings.append(reading)
        durations = {name: list(of) for name, of in timed.durations_ns.items()}
        errors = dict(nvml.errors)
    return Cost(
        tick_ms=median(lengths),
        calls_ms={name: median(of) / 1e6 for name, of in sorted(durations.items()) if name not in ONCE},
        per_tick={name: len(of) / ticks for name, of in durations.items()},
        errors=errors,
        readings=tuple(readings),
        mps_clients=clients,
    )


def _tick(nvml: Nvml) -> tuple[DeviceReading, frozenset[int]]:
    """Reads what agent/collectors/devices.py reads of each device."""
    device = nvml.devices()[0]
    reading = nvml.read(device)
    listed = nvml.processes(device)
    nvml.process_utilization(device, [tgid for tgid, _ in listed])
    return reading, nvml.mps_clients(device)


def milliseconds(call: Callable[[], object], times: int) -> float:
    """The median of so many calls."""
    lengths = []
    for _ in range(times):
        begun = time.perf_counter_ns()
        call()
        lengths.append((time.perf_counter_ns() - begun) / 1e6)
    return median(lengths)
