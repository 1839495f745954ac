# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Runs items one after the other within a limit of time. None can stop another; each one's rows are kept at once."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from conformance import checks
from conformance.checks import MOST, Item
from conformance.isolation import RUN_VARIABLE, STATE_FILE, WHOLE, ItemRunner
from conformance.machine_state import ROOT, SIM_BUILD, MachineState, item_environment, last_state, unknown_state
from conformance.report.model import Row, failed, skipped
from conformance.report.writer import Report

LAST: Final = "leftovers"  # always looked at
_LOOKING_SECONDS: Final = 60.0
_DYING_SECONDS: Final = 5.0
_DEVICES: Final = Path("/dev")


def allotted(item: Item, left: float) -> float | None:
    """Seconds for an item when so many are left, without those that are kept free for later ones. None: too few.

    Cleaning up after another may have taken some of its own.
    """
    if item.name == LAST:
        return item.seconds
    return min(item.seconds, left) if left >= MOST * item.least_seconds else None


@dataclass(frozen=True, slots=True)
class Driver:
    """`folder` is scratch, `out` is where the report goes; `show` gets each item's title and rows as it ends."""

    report: Report
    folder: Path
    out: Path
    log: IO[bytes]
    show: Callable[[str, Sequence[Row]], None]

    def run(self, names: Sequence[str], limit_seconds: float) -> None:
        """All of them. KeyboardInterrupt passes through when everything that was begun is ended."""
        ends = time.monotonic() + limit_seconds
        seen = self._observe()
        self.report.write(self.out)
        (self.folder / STATE_FILE).write_text(seen.as_json())
        attempt = ItemRunner(self.folder, self.log, item_environment(seen), self.report.quick, adopting=True)
        attempt.sweep()  # what observing the machine left
        everything = [self._found(name) for name in names]
        with gpus_kept_on(seen):
            for number, (name, item) in enumerate(zip(names, everything, strict=True)):
                after = sum(one.least_seconds for one in everything[number + 1 :] if isinstance(one, Item))
                self._one(attempt, name, item, ends - after)
        self.report.complete = True
        self.report.write(self.out)

    def _found(self, name: str) -> Item | str:
        """The item, or what is wrong with it."""
        try:
            return checks.item(name)
        except Exception as error:  # noqa: BLE001  # a module that cannot be imported must not stop the others
            return f"its module cannot be used: {type(error).__name__}: {error}"

    def _one(self, attempt: ItemRunner, name: str, item: Item | str, ends: float) -> None:
        began, first, title = time.monotonic(), len(self.report.rows), name
        if isinstance(item, str):
            self.report.rows.append(failed(name, WHOLE, item))
        else:
            title = item.title if item.title.lower().startswith(name) else f"{name}: {item.title}"
            self._rows(attempt, item, ends - began)
        taken = round(time.monotonic() - began, 2)
        self.report.seconds[name] = taken
        self.report.write(self.out)
        with contextlib.suppress(OSError, ValueError):  # its reader is gone
            self.show(f"{title} ({self.report.source}, {taken:.1f} s)", self.report.rows[first:])

    def _rows(self, attempt: ItemRunner, item: Item, left: float) -> None:
        seconds = allotted(item, left)
        if seconds is None:
            why = f"{max(left, 0):.0f} s are left for it, and it needs {item.least_seconds:.0f} s"
            self.report.rows.append(skipped(item.name, WHOLE, f"{why}: give more by --limit-seconds, or use --only"))
            return
        with contextlib.closing(attempt.rows(item.name, seconds)) as rows:  # also when a signal comes in between
            for row in rows:
                self.report.rows.append(row)
                self.report.write(self.out)

    def _observe(self) -> MachineState:
        """In a process of its own: a driver that hangs must not hang the run."""
        simulated = self.report.simulated
        given = os.environ.get("LD_LIBRARY_PATH", "")
        path = {"LD_LIBRARY_PATH": f"{SIM_BUILD / 'lib'}:{given}".rstrip(":")} if simulated else {}
        output = self.folder / "machine-state.out"  # a file: another process may hold a pipe open
        with output.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "conformance.machine_state", *(["--simulated"] if simulated else [])],
                env={**os.environ, **path, RUN_VARIABLE: str(self.folder)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=self.log,
            )
        try:
            ended = f"exit status {process.wait(_LOOKING_SECONDS)}"
        except subprocess.TimeoutExpired:
            ended = f"not done within {_LOOKING_SECONDS:g} s"
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
                process.wait(_DYING_SECONDS)
        seen = last_state(output.read_text(errors="replace"))
        return seen or unknown_state(
            simulated, f"looking at this machine failed ({ended}); the log has what was printed"
        )


@contextlib.contextmanager
def gpus_kept_on(seen: MachineState) -> Iterator[None]:
    """Without persistence mode the driver shuts a GPU down when no process has it open: seconds for each program.

    Holding it open changes no setting. Where NVML did not answer, opening it might hang.
    """
    with contextlib.ExitStack() as stack:
        if seen.before.settings and not seen.simulated:
            for device in sorted(_DEVICES.glob("nvidia[0-9]*")):
                with contextlib.suppress(OSError):
                    stack.callback(os.close, os.open(device, os.O_RDWR | os.O_CLOEXEC))
        yield
