# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a run has found so far, as a file: written again after each row, so that one that is cut off leaves it."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from conformance.machine_state import ROOT
from conformance.report.model import Row, Verdict

FORMAT: Final = 1
NAME: Final = "report.json"
_PART_OF = "machine"  # the item whose rows say where a run was


@dataclass(slots=True)
class Report:
    """`source`: of each row too, so that none is taken for what it is not."""

    simulated: bool
    quick: bool
    started: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    version: str = field(default_factory=lambda: code_version())
    seconds: dict[str, float] = field(default_factory=dict)  # that each item took
    rows: list[Row] = field(default_factory=list)
    complete: bool = False

    @property
    def source(self) -> str:
        """ "real" or "simulated"."""
        return "simulated" if self.simulated else "real"

    def counts(self) -> Counter[Verdict]:
        """Rows of each verdict."""
        return Counter(row.verdict for row in self.rows)

    def machine(self) -> dict[str, Any]:
        """The machine's known facts: figures of the item `machine`."""
        return {row.what: row.figure for row in self.rows if row.item == _PART_OF and row.figure is not None}

    def as_json(self) -> dict[str, Any]:
        """The report as a JSON object."""
        machine = self.machine()
        return {
            "format": FORMAT,
            "source": self.source,
            "quick": self.quick,
            "date": self.started,
            "gpu": machine.get("GPU"),
            "driver": machine.get("driver"),
            "version": self.version,
            "complete": self.complete,
            "seconds": self.seconds,
            "machine": machine,
            "rows": [{**asdict(row), "source": self.source} for row in self.rows],
        }

    def write(self, folder: Path) -> Path:
        """Writes the report, whole: a reader never finds half of it."""
        path = folder / NAME
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(self.as_json(), ensure_ascii=False, indent=1) + "\n")
        os.replace(partial, path)
        return path


def code_version() -> str:
    """Of this code: of the bundle, or of the checkout; "unknown" where neither says so."""
    beside = ROOT / "VERSION"
    if beside.is_file():
        return beside.read_text().strip()
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--tags"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def summary(rows: Sequence[Row]) -> str:
    """How many of which."""
    counts = Counter(row.verdict for row in rows)
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict]) or "no rows"
