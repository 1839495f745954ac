# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A report of sampled stacks, as a value, and its forms: folded stacks, JSON, and a pprof profile.

Names come from the sampled programs: they are printable when they arrive here, and form no frame or line of their own.
In a profile the sum of the samples' values is the report's total. Frames are names, so each name is one function and
one location without an address; the mapping says that functions are known, and readers look for no binary. Source:
github.com/google/pprof, proto/profile.proto.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from agent.core.clock import NS_PER_SECOND
from agent.core.protobuf import Fields, message_classes
from agent.core.text import printable
from agent.stacks.sampler import LOSSES

Frames = tuple[str, ...]
_SHALLOW = 3  # process, caller, driver function: how the caller was reached is unknown


@dataclass(frozen=True, slots=True)
class StackReport:
    """`stacks`: frames, outermost first, → launches or bytes. `tallies`: calls seen and sampled, and samples lost."""

    container: str
    kind: str
    seconds: float
    stacks: Mapping[Frames, int]
    tallies: Mapping[str, int] = field(default_factory=dict)
    ended_unix_ns: int | None = None

    @property
    def unit(self) -> str:
        """The unit of a stack's value."""
        return "bytes" if self.kind == "alloc" else "launches"

    @property
    def headline(self) -> str:
        """One line: container, kind, duration, counts, losses."""
        losses = [f"{name} {count}" for name in LOSSES if (count := self.tallies.get(name, 0))]
        return (
            f"{self.container}: {self.kind} stacks over {self.seconds:.1f} s, {self.tallies.get('sampled', 0)} samples "
            f"of {self.tallies.get('seen', 0)} calls, {sum(self.stacks.values())} {self.unit}; "
            f"lost: {', '.join(losses) or 'nothing'}"
        )

    def notes(self) -> list[str]:
        """What a reader must know to interpret the values."""
        found = []
        if self.kind == "alloc":
            found.append("memory that was allocated before the command began is not included")
        total = sum(self.stacks.values())
        shallow = sum(value for frames, value in self.stacks.items() if len(frames) <= _SHALLOW)
        if total and 2 * shallow > total:
            found.append(
                f"{shallow * 100 // total} % have no callers: the program was built without frame pointers "
                "(rebuild it with -fno-omit-frame-pointer; Python: --with-frame-pointers or 3.12's perf build)"
            )
        if not total:
            found.append(f"no {self.unit} were seen during this time")
        return found


def merge(stacks: Iterable[tuple[Frames, int]]) -> dict[Frames, int]:
    """Values of equal stacks added up, as addresses differ within a function; stacks without a value left out."""
    merged: Counter[Frames] = Counter()
    for frames, value in stacks:
        if value > 0:
            merged[frames] += value
    return dict(sorted(merged.items()))


def folded(report: StackReport) -> str:
    """Folded stacks: a line `frame;frame;frame value` each, as flamegraph.pl and speedscope read them."""
    lines = (f"{';'.join(frame.replace(';', ':') for frame in frames)} {v}\n" for frames, v in report.stacks.items())
    return "".join(lines)


def as_json(report: StackReport) -> str:
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


PACKAGE: Final = "perftools.profiles"

# What is written of each message; integers that are not ids or values are indices into string_table.
MESSAGES: Final[dict[str, Fields]] = {
    "Profile": (
        (1, "sample_type", "*ValueType"),
        (2, "sample", "*Sample"),
        (3, "mapping", "*Mapping"),
        (4, "location", "*Location"),
        (5, "function", "*Function"),
        (6, "string_table", "*string"),
        (9, "time_nanos", "int64"),
        (10, "duration_nanos", "int64"),
        (13, "comment", "*int64"),
    ),
    "ValueType": ((1, "type", "int64"), (2, "unit", "int64")),
    "Sample": ((1, "location_id", "*uint64"), (2, "value", "*int64")),
    "Mapping": ((1, "id", "uint64"), (5, "filename", "int64"), (7, "has_functions", "bool")),
    "Location": ((1, "id", "uint64"), (2, "mapping_id", "uint64"), (4, "line", "*Line")),
    "Line": ((1, "function_id", "uint64"),),
    "Function": ((1, "id", "uint64"), (2, "name", "int64"), (3, "system_name", "int64")),
}

_CLASSES: Final = message_classes(PACKAGE, MESSAGES)
_SAMPLE_TYPES: Final = {"launches": ("launches", "count"), "bytes": ("inuse_space", "bytes")}  # by the report's unit
_MAPPING_ID: Final = 1


def profile(report: StackReport) -> bytes:
    """The content of a .pb.gz file; the same bytes for the same report."""
    return gzip.compress(_Builder(report).message.SerializeToString(), mtime=0)


class _Builder:
    """Fills a Profile message; strings, functions and locations are numbered in the order of their first use."""

    def __init__(self, report: StackReport) -> None:
        self.message = _CLASSES["Profile"]()
        self._strings: dict[str, int] = {}
        self._locations: dict[str, int] = {}
        self._string("")  # index 0, by definition
        self._add_header(report)
        for frames, value in report.stacks.items():
            locations = [self._location(name) for name in reversed(frames)]  # innermost first
            self.message.sample.add(location_id=locations, value=[value])

    def _add_header(self, report: StackReport) -> None:
        kind, unit = _SAMPLE_TYPES[report.unit]
        self.message.sample_type.add(type=self._string(kind), unit=self._string(unit))
        self.message.mapping.add(id=_MAPPING_ID, filename=self._string(report.container), has_functions=True)
        self.message.time_nanos = report.ended_unix_ns or 0
        self.message.duration_nanos = round(report.seconds * NS_PER_SECOND)
        self.message.comment.extend(self._string(line) for line in (report.headline, *report.notes()))

    def _location(self, name: str) -> int:
        name = printable(name)
        if name not in self._locations:
            number = self._locations[name] = len(self._locations) + 1
            index = self._string(name)
            self.message.function.add(id=number, name=index, system_name=index)
            line: Any = _CLASSES["Line"](function_id=number)
            self.message.location.add(id=number, mapping_id=_MAPPING_ID, line=[line])
        return self._locations[name]

    def _string(self, text: str) -> int:
        text = printable(text)
        if text not in self._strings:
            self._strings[text] = len(self._strings)
            self.message.string_table.append(text)
        return self._strings[text]
