# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether anything was in the way of a measurement: the share of time in which a runnable task had to wait for a CPU
(PSI), or in which the hypervisor had taken the CPUs. Neither knows anything of what was measured, so repeating by them
favours no result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

QUIET_RATIO: Final = 0.10
STOLEN_RATIO: Final = 0.02  # of the CPUs' time: more shows in latencies of milliseconds
_SAMPLE_SECONDS: Final = 2.0
_PATIENCE_SECONDS: Final = 120.0
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Stolen:
    """A moment, for what the hypervisor takes from the CPUs after it. `seconds`: of all of them, since boot."""

    at: float  # time.monotonic()
    seconds: float

    @classmethod
    def now(cls) -> Stolen:
        """This moment."""
        ticks = int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8])
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"))

    def ratio(self) -> float:
        """Of the CPUs' time since then."""
        now = Stolen.now()
        return (now.seconds - self.seconds) / (now.at - self.at) / (os.cpu_count() or 1)


def waited_us() -> int | None:
    """How long tasks have waited for a CPU since boot; None where the kernel does not count it."""
    try:
        text = Path("/proc/pressure/cpu").read_text()
    except OSError:
        return None
    return int(text.partition("total=")[2].split()[0])


def timed(action: Callable[[], T]) -> tuple[T, float | None]:
    """The result of the action, and the share of its time in which a task waited for a CPU, or a CPU was taken away."""
    stolen, before = Stolen.now(), waited_us()
    result = action()
    after = waited_us()
    if before is None or after is None:
        return result, None
    return result, max(stolen.ratio(), (after - before) / 1e6 / (time.monotonic() - stolen.at))


def wait_until_quiet() -> None:
    """Returns once the machine is quiet, or after two minutes."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while time.monotonic() < deadline:
        _, pressure = timed(lambda: time.sleep(_SAMPLE_SECONDS))
        if pressure is None or pressure <= QUIET_RATIO / 2:
            return


def measure_undisturbed(action: Callable[[], T]) -> tuple[T, float | None]:
    """The first result of at most three that nothing disturbed, else the least disturbed; and its pressure."""
    results: list[tuple[T, float | None]] = []
    for _ in range(_TRIES):
        wait_until_quiet()
        results.append(timed(action))
        pressure = results[-1][1]
        if pressure is None or pressure <= QUIET_RATIO:
            return results[-1]
    return min(results, key=lambda result: result[1] or 0.0)
