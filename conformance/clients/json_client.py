# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Talking with a program of conformance/programs: a line to it, a line of JSON from it, never without a time limit."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from conformance.host import Host

PROGRAMS: Final = Path(__file__).resolve().parents[1] / "programs"
_MOST_WORDS: Final = 300  # of a program's last output


class NoAnswerError(Exception):
    """The program ended, wrote what is no JSON, or nothing in time; the message has its last output."""


class JsonClient:
    """A running program. Its standard error is kept in a file, for error messages."""

    def __init__(self, host: Host, name: str, command: Sequence[str], extra: Mapping[str, str] | None = None) -> None:
        self._here = host
        self.greeting: dict[str, Any] = {}  # its line when it was ready, for the caller that waited for it
        self._errors = host.folder / f"{name}.err"
        with self._errors.open("wb") as errors:
            self.process = host.start(command, extra, stderr=errors)
        self._lines: queue.Queue[str] = queue.Queue()
        assert self.process.stdout
        threading.Thread(target=self._listen, args=(self.process.stdout,), daemon=True).start()

    def _listen(self, stdout: IO[str]) -> None:
        try:
            for line in stdout:
                self._lines.put(line)
        except (OSError, ValueError):  # it was closed meanwhile
            pass
        self._lines.put("")

    def hear(self, seconds: float) -> str:
        """Reads its next line, without the newline. NoAnswerError."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise NoAnswerError(f"nothing within {seconds:.0f} s; {self._last_words()}") from None
        if not line:
            self._lines.put("")
            raise NoAnswerError(f"it ended; {self._last_words()}")
        return line.rstrip("\n")

    def hear_json(self, seconds: float) -> dict[str, Any]:
        """Reads its next line as an object. NoAnswerError."""
        line = self.hear(seconds)
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise NoAnswerError(f"no JSON: {line[:_MOST_WORDS]}")
        return found

    def ask(self, line: str, seconds: float) -> dict[str, Any]:
        """Sends a line; its answer as an object. NoAnswerError."""
        assert self.process.stdin
        try:
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()
        except OSError:
            raise NoAnswerError(f"it ended; {self._last_words()}") from None
        return self.hear_json(seconds)

    def end(self) -> None:
        """Ends the program."""
        self._here.end(self.process)

    def _last_words(self) -> str:
        words = " ".join(self._errors.read_text(errors="replace").split())
        return f"its last words: {words[-_MOST_WORDS:]}" if words else "its stderr is empty"

    def __enter__(self) -> JsonClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
