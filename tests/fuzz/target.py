# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a target of the fuzzer is, and how one input is judged: a value or the documented error, within a second of CPU.

A target takes bytes and hands them to code of the product as if they came from where its inputs come from. It catches
the errors that this code documents; whatever else it raises is a fault, as is what it asserts about the result.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

CORPUS: Final = Path(__file__).parent / "corpus"
MOST_CPU_SECONDS: Final = 1.0
SEPARATOR: Final = b"\xff"
"""Between the answers that one input holds: no byte of UTF-8"""
_GROWN_EACH: Final = 256  # one input of so many is tried repeated as well, as large as its source may send it


class SlowError(Exception):
    """An input took longer than a second of CPU time."""


@dataclass(frozen=True, slots=True)
class Target:
    """`run` takes one input. `grown_bytes`: up to which size inputs are repeated; 0 where that makes no sense."""

    says: str
    run: Callable[[bytes], None]
    grown_bytes: int = 0


def judge(target: Target, data: bytes, clock: Callable[[], float] = time.thread_time) -> None:
    """Raises whatever is wrong with what the target makes of the input."""
    for given in _sizes(target, data):
        began = clock()
        target.run(given)
        took = clock() - began
        if took > MOST_CPU_SECONDS:
            raise SlowError(f"{len(given)} bytes took {took:.1f} s of CPU time")


def _sizes(target: Target, data: bytes) -> Iterator[bytes]:
    """The input and, for some, chosen by what they hold so that a fault can be repeated, many times the input."""
    yield data
    if data and target.grown_bytes > 2 * len(data) and zlib.crc32(data) % _GROWN_EACH == 0:
        yield data * (target.grown_bytes // len(data))


def answers(data: bytes) -> Callable[[], bytes]:
    """One answer after another of those that an input holds, from the beginning again when they are used up."""
    parts = data.split(SEPARATOR)
    given = 0

    def following() -> bytes:
        nonlocal given
        part = parts[given % len(parts)]
        given += 1
        return part

    return following


def require(holds: bool, what: str) -> None:
    """AssertionError: an invariant of the result does not hold."""
    if not holds:
        raise AssertionError(what)


def seeds(name: str) -> list[Path]:
    """The committed inputs of a target."""
    return sorted(path for path in (CORPUS / name).iterdir() if path.is_file())
