# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kernel's view of one HTTP connection (bpf/http_connection.h), compiled for user space."""

from __future__ import annotations

import ctypes as c
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from enforce.signals.http_probe import TALLIES, Watch, WatchedPort

_HERE = Path(__file__).parent
READ, WRITE = 0, 1
_MOST_OUTCOMES = 4096


class _Outcome(c.Structure):
    _fields_ = [
        ("begun_ns", c.c_uint64),
        ("ended_ns", c.c_uint64),
        ("answer_ns", c.c_uint64),
        ("receive_us", c.c_uint32),
        ("body_us", c.c_uint32),
        ("status_class", c.c_uint32),
        ("tally", c.c_uint32),
        ("count", c.c_uint32),
    ]


def build(folder: Path) -> c.CDLL:
    """The shared library."""
    path = folder / "http_parser.so"
    flags = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    includes = f"-I{_HERE.parents[2] / 'bpf'}"
    subprocess.run(["gcc", *flags, includes, str(_HERE / "http_parser.c"), "-o", str(path)], check=True)
    library = c.CDLL(str(path))
    library.size_of_connection.restype = c.c_size_t
    return library


@dataclass(slots=True)
class Connection:
    """One connection; `now` counts the calls."""

    library: c.CDLL
    path: str = ""
    fresh: bool = True
    now: int = 0
    latencies: list[tuple[int, int]] = field(default_factory=list)  # (call in which it began, in which it ended)
    answers: list[tuple[int, int]] = field(default_factory=list)  # (call of its first byte, first digit of its status)
    tallies: Counter[str] = field(default_factory=Counter)
    _state: c.Array[c.c_char] = field(init=False)
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self._state = c.create_string_buffer(self.library.size_of_connection())
        self._watch = Watch.of(1, WatchedPort(80, self.path))
        self.library.start(self._state, int(self.fresh))

    def read(self, data: bytes) -> int:
        """The server reads this in one call; the call's number."""
        return self._feed(READ, data)

    def write(self, data: bytes) -> int:
        """The server writes this in one call."""
        return self._feed(WRITE, data)

    def end(self) -> None:
        """The server closes."""
        outcomes = (_Outcome * _MOST_OUTCOMES)()
        self._settle(outcomes, self.library.end(self._state, outcomes))

    def _feed(self, side: int, data: bytes) -> int:
        self.now += 1
        outcomes = (_Outcome * _MOST_OUTCOMES)()
        time = c.c_uint64(self.now << 3)  # the lowest bits of a time are not kept
        watch, length = c.byref(self._watch), c.c_size_t(len(data))
        count = self.library.feed(self._state, side, watch, data, length, time, outcomes)
        self._settle(outcomes, count)
        return self.now

    def _settle(self, outcomes: c.Array[_Outcome], count: int) -> None:
        for outcome in outcomes[:count]:
            self.tallies[TALLIES[outcome.tally]] += outcome.count
            if TALLIES[outcome.tally] == "answered":
                self.latencies.append((outcome.begun_ns >> 3, outcome.ended_ns >> 3))
                self.answers.append((outcome.answer_ns >> 3, outcome.status_class))
