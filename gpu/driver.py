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

LAST: Final = "leftovers"  # always looked at
_LOOKING_SECONDS: Final = 25.0  # beside the limit


def allotted(item: Item, left: float) -> float | None:
    """Seconds for an item when so many are left, without those that later ones need. None: too few."""
    if item.name == LAST:
        return item.seconds
    return min(item.seconds, left) if left >= item.least_seconds else None


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
        seen = self._look()
        ends = time.monotonic() + limit_seconds
        (self.folder / LOOK).write_text(seen.as_json())
        attempt = Attempt(self.folder, self.log, item_environment(seen), self.report.quick, adopting=True)
        everything = [self._found(name) for name in names]
        for number, (name, item) in enumerate(zip(names, everything, strict=True)):
            after = sum(one.least_seconds for one in everything[number + 1 :] if isinstance(one, Item))
            self._one(attempt, name, item, ends - after)
            self.report.write(self.out)
        self.report.complete = True

    def _found(self, name: str) -> Item | str:
        """The item, or what is wrong with it."""
        try:
            return items.item(name)
        except Exception as error:  # noqa: BLE001  # a module that cannot be imported must not stop the others
            return f"its module cannot be used: {type(error).__name__}: {error}"

    def _one(self, attempt: Attempt, name: str, item: Item | str, ends: float) -> None:
        began, first, title = time.monotonic(), len(self.report.rows), name
        if isinstance(item, str):
            self.report.rows.append(failed(name, WHOLE, item))
        else:
            title = item.title if item.title.lower().startswith(name) else f"{name}: {item.title}"
            self._rows(attempt, item, ends - began)
        taken = round(time.monotonic() - began, 2)
        self.report.seconds[name] = taken
        self.show(f"{title} ({self.report.source}, {taken:.1f} s)", self.report.rows[first:])

    def _rows(self, attempt: Attempt, item: Item, left: float) -> None:
        seconds = allotted(item, left)
        if seconds is None:
            why = f"{max(left, 0):.0f} s are left for it, and it needs {item.least_seconds:.0f} s"
            self.report.rows.append(skipped(item.name, WHOLE, f"{why}: give more by --limit-seconds, or use --only"))
            return
        for row in attempt.rows(item.name, seconds):
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
