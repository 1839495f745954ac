# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's log on stderr: text, or one JSON object a line for the journal and log collectors.

Invariants: names from outside cannot steer a terminal in either format, nor begin a line of text.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from agent.core.errors import MistakesError
from agent.core.text import printable

_BELOW: Final = "\n  "


class Format(StrEnum):
    """`auto` is JSON where stderr is systemd's journal, else text."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


class TextLines(logging.Formatter):
    """Time, level, logger, message; the further mistakes of a file and a traceback below, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's name
        """One line, unless it lists the mistakes of a file: a name with line breaks begins no entry of its own."""
        text = super().formatMessage(record)
        return _below(text) if _lists_mistakes(record) else printable(text)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # the base class's name
        """The traceback, indented below the message."""
        return "  " + _below(super().formatException(ei))


class JsonLines(logging.Formatter):
    """time (UTC), level, logger, message, traceback if any; printable, as jq -r shows it raw on a terminal."""

    def format(self, record: logging.LogRecord) -> str:
        """One entry: one line of ASCII."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _printable_lines(record.getMessage())
            if _lists_mistakes(record)
            else printable(record.getMessage()),
        }
        if record.exc_info:
            entry["traceback"] = _printable_lines(self.formatException(record.exc_info))
        return json.dumps(entry)


class PlainLines(logging.Formatter):
    """The program's name and the message."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's name
        """One line."""
        return printable(super().formatMessage(record))


def open_standard_streams() -> None:
    """Opens those of stdin, stdout and stderr that the caller has closed, on /dev/null.

    First of all: a file or map that is opened later would have their number, and be what children read and write.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(opened, True)
            setattr(sys, name, open(opened, mode, closefd=False))  # noqa: SIM115  # for as long as the process lives


def configure(chosen: Format, level: int = logging.INFO) -> None:
    """Sets up the root logger. To be called once, before anything is logged."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = chosen is Format.JSON or (chosen is Format.AUTO and _is_journal())
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(level=level, handlers=[handler])


def plain(program: str, level: int) -> None:
    """As `configure`, for a program whose log is errors only: the program's name and the message."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainLines(program))
    logging.basicConfig(level=level, handlers=[handler])


def in_force() -> Format:
    """The format that `configure` chose: for a child process that is to log the same way."""
    written = (handler.formatter for handler in logging.getLogger().handlers)
    return Format.JSON if any(isinstance(formatter, JsonLines) for formatter in written) else Format.TEXT


def say(line: str, level: int = logging.INFO) -> None:
    """Prints a bare line to stderr; in JSON format it is a log entry like any other."""
    if in_force() is Format.JSON:
        logging.getLogger("gpuwarden").log(level, line)
    else:
        print(_printable_lines(line), file=sys.stderr, flush=True)


def _lists_mistakes(record: logging.LogRecord) -> bool:
    return any(isinstance(argument, MistakesError) for argument in record.args or ())


def _printable_lines(text: str) -> str:
    """Printable text that keeps its line breaks: these were written by us."""
    return "\n".join(map(printable, text.split("\n")))


def _below(text: str) -> str:
    return _BELOW.join(map(printable, text.split("\n")))


def _is_journal() -> bool:
    """Whether stderr is the stream that systemd connected to the journal, and was not redirected since."""
    status = os.fstat(2)
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
