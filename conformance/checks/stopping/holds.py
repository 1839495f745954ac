# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Ways to make a process stand still, as the product has them. `hold` and `release` ask; `holds` looks."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from conformance.checks.stopping.timeline import Hold
from tools.harness.wait import until

if TYPE_CHECKING:
    from enforce.actuators.freezer.cgroup import Cgroup

_PATIENCE_SECONDS: Final = 5.0
_STOPPED: Final = frozenset("Tt")


class StuckError(Exception):
    """The target did not stop, or did not run again, in time."""


class HoldTarget(Protocol):
    """A process, or its cgroup, that can be held."""

    def hold(self) -> None:
        """Asks the target to stop."""
        ...

    def release(self) -> None:
        """Asks the target to run."""
        ...

    def holds(self) -> bool:
        """Whether all of it stands still now."""
        ...


@dataclass(frozen=True, slots=True)
class Signals:
    """SIGSTOP and SIGCONT."""

    tgid: int

    def hold(self) -> None:
        os.kill(self.tgid, signal.SIGSTOP)

    def release(self) -> None:
        os.kill(self.tgid, signal.SIGCONT)

    def holds(self) -> bool:
        return is_stopped(self.tgid)


@dataclass(frozen=True, slots=True)
class Freezer:
    """A cgroup's, through the product's own code."""

    cgroup: Cgroup

    def hold(self) -> None:
        self.cgroup.freeze()

    def release(self) -> None:
        self.cgroup.thaw()

    def holds(self) -> bool:
        return self.cgroup.is_frozen()


def states(tgid: int) -> frozenset[str]:
    """Of all threads, one letter each as in /proc/PID/stat. None of a process that is gone."""
    found = set()
    try:
        for task in Path(f"/proc/{tgid}/task").iterdir():
            found.add((task / "stat").read_text().rpartition(")")[2].split()[0])
    except (OSError, IndexError):  # a thread, or all of it, ended meanwhile
        pass
    return frozenset(found)


def is_stopped(tgid: int) -> bool:
    """Whether every thread of it is stopped."""
    found = states(tgid)
    return bool(found) and found <= _STOPPED


def held(brake: HoldTarget, seconds: float) -> Hold:
    """Holds it for so long once it stands still; 0: lets it go at once. StuckError."""
    asked = time.monotonic_ns()
    brake.hold()
    try:
        still = _when(brake.holds, "to stand still")
        time.sleep(seconds)
    finally:
        released = time.monotonic_ns()
        brake.release()
    running = _when(lambda: not brake.holds(), "to run again")
    return Hold(asked, still, released, running)


def _when(holds: Callable[[], bool], what: str) -> int:
    """When it first held, in ns. Looks without a pause: the moment is what is measured."""
    until(holds, f"it {what}", _PATIENCE_SECONDS, 0.0, StuckError)
    return time.monotonic_ns()
