# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Runs items one after the other within a limit of time. None can stop another; each one's rows are kept at once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from gpu import items
from gpu.attempt import RUN_VARIABLE, Attempt
from gpu.item import LOOK, WHOLE
from gpu.items import Item
from gpu.look import ROOT, SIM_BUILD, Look, blind, item_environment, look_from
from gpu.report import Report
from gpu.row import Row, failed, skipped

LAST: Final = "leftovers"  # always looked at: time is kept for it
LAST_SECONDS: Final = 10.0
_LOOKING_SECONDS: Final = 75.0


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
        seen = self._look()
        (self.folder / LOOK).write_text(seen.as_json())
        attempt = Attempt(self.folder, self.log, item_environment(seen), self.report.quick, adopting=True)
        for name in names:
            self._one(attempt, name, ends - (LAST_SECONDS if LAST in names and name != LAST else 0.0))
            self.report.write(self.out)
        self.report.complete = True

    def _one(self, attempt: Attempt, name: str, ends: float) -> None:
        began, left = time.monotonic(), ends - time.monotonic()
        first = len(self.report.rows)
        title = name
        try:
            item = items.item(name)
        except Exception as error:  # noqa: BLE001 - a module that cannot be imported must not stop the others
            self.report.rows.append(failed(name, WHOLE, f"its module cannot be used: {type(error).__name__}: {error}"))
        else:
            title = item.title if item.title.lower().startswith(name) else f"{name}: {item.title}"
            self._rows(attempt, item, left)
        taken = round(time.monotonic() - began, 2)
        self.report.seconds[name] = taken
        self.show(f"{title} ({self.report.source}, {taken:.1f} s)", self.report.rows[first:])

    def _rows(self, attempt: Attempt, item: Item, left: float) -> None:
        if item.seconds > left and item.name != LAST:
            why = f"{max(left, 0):.0f} s are left of the run's time, and it may take {item.seconds:.0f} s"
            self.report.rows.append(skipped(item.name, WHOLE, f"{why}: give more by --limit-seconds, or use --only"))
            return
        for row in attempt.rows(item.name, item.seconds):
            self.report.rows.append(row)

    def _look(self) -> Look:
        """In a process of its own: a driver that hangs must not hang the run."""
        simulated = self.report.simulated
        given = os.environ.get("LD_LIBRARY_PATH", "")
        path = {"LD_LIBRARY_PATH": f"{SIM_BUILD / 'lib'}:{given}".rstrip(":")} if simulated else {}
        try:
            done = subprocess.run(
                [sys.executable, "-m", "gpu.look", *(["--simulated"] if simulated else [])],
                env={**os.environ, **path, RUN_VARIABLE: str(self.folder)},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self.log,
                text=True,
                timeout=_LOOKING_SECONDS,
                check=True,
            )
            return look_from(done.stdout)
        except (subprocess.SubprocessError, ValueError, TypeError, KeyError) as error:
            return blind(simulated, f"looking at this machine failed ({error}); the log has what was printed")
