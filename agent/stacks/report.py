# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What was sampled, as a value, and its text forms: folded stacks and JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from agent.stacks.layout import LOSSES

Frames = tuple[str, ...]
_SHALLOW = 3  # process, caller, driver: nothing says how the caller was reached


@dataclass(frozen=True, slots=True)
class Report:
    """`stacks`: frames, outermost first, → launches or bytes. `tallies`: what was seen, recorded and lost."""

    container: str
    kind: str
    seconds: float
    stacks: Mapping[Frames, int]
    tallies: Mapping[str, int] = field(default_factory=dict)

    @property
    def unit(self) -> str:
        """What a stack's value counts."""
        return "bytes" if self.kind == "alloc" else "launches"

    @property
    def headline(self) -> str:
        """One line: who, what, how long, how many, what was lost."""
        losses = [f"{name} {count}" for name in LOSSES if (count := self.tallies.get(name, 0))]
        return (
            f"{self.container}: {self.kind} stacks over {self.seconds:.1f} s, {self.tallies.get('sampled', 0)} samples "
            f"of {self.tallies.get('seen', 0)} calls, {sum(self.stacks.values())} {self.unit}; "
            f"lost: {', '.join(losses) or 'nothing'}"
        )

    def notes(self) -> list[str]:
        """What a reader must know to read it rightly."""
        found = []
        if self.kind == "alloc":
            found.append("memory that was allocated before the command began is not in it")
        total = sum(self.stacks.values())
        shallow = sum(value for frames, value in self.stacks.items() if len(frames) <= _SHALLOW)
        if total and 2 * shallow > total:
            found.append(
                f"{shallow * 100 // total} % of it has no callers: that program is built without frame pointers "
                "(rebuild it with -fno-omit-frame-pointer; Python: --with-frame-pointers or 3.12's perf build)"
            )
        if not total:
            found.append(f"no {self.unit} were seen: the container did none meanwhile")
        return found


def merge(stacks: Iterable[tuple[Frames, int]]) -> dict[Frames, int]:
    """Stacks of one name added up (addresses differ within a function); those of nothing left out."""
    merged: Counter[Frames] = Counter()
    for frames, value in stacks:
        if value > 0:
            merged[frames] += value
    return dict(sorted(merged.items()))


def folded(report: Report) -> str:
    """`frame;frame;frame value`, a line each, as flame graph tools read it."""
    lines = (f"{';'.join(frame.replace(';', ':') for frame in frames)} {v}\n" for frames, v in report.stacks.items())
    return "".join(lines)


def as_json(report: Report) -> str:
    """One object, one line."""
    stacks = [{"frames": list(frames), "value": value} for frames, value in report.stacks.items()]
    document = {
        "container": report.container,
        "kind": report.kind,
        "unit": report.unit,
        "seconds": round(report.seconds, 3),
        "tallies": dict(report.tallies),
        "notes": report.notes(),
        "stacks": stacks,
    }
    return json.dumps(document) + "\n"
