# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A process (library_caller.c) that calls functions of a shared library, as often and as fast as it is asked to."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import TracebackType
from typing import Final, Self

_PROGRAM: Final = Path(__file__).resolve().parents[2] / "build" / "harness" / "library_caller"  # `make setup`


class LibraryCaller:
    """A context manager; leaving it ends the process. Each method raises ChildProcessError when the process cannot."""

    def __init__(self) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([_PROGRAM], stdin=pipe, stdout=pipe, text=True)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def open(self, library: Path) -> None:
        """Maps it, unless it is mapped."""
        self._ask(f"open {library}")

    def call(self, name: str, times: int) -> tuple[int, float]:
        """What the last call returned, and microseconds per call."""
        result, ns = self._ask(f"call {name} {times}").split()
        return int(result), float(ns) / 1e3

    def _ask(self, line: str) -> str:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        if not answer:
            raise ChildProcessError(f"{line}: the process ended with status {self._process.wait()}")
        if answer.startswith("failed"):
            raise ChildProcessError(f"{line}: {answer}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()
