# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the agent writes on stderr: lines for people, or JSON, a line each, for the journal and log collectors.

Invariants: names from outside are shown, never obeyed, in either; what begins a line of text is written by us.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Final

from agent.errors import MistakesError
from agent.names import printable

_BELOW: Final = "\n  "


class Format(StrEnum):
    """`auto` is JSON where stderr is systemd's journal, else text."""

    AUTO = "auto"
    TEXT = "text"
    JSON = "json"


class TextLines(logging.Formatter):
    """Time, level, logger, message; a file's further mistakes and a traceback's lines below, indented."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's name
        """One line, unless it names a file's mistakes: a name that has line breaks makes no entry of its own."""
        text = super().formatMessage(record)
        return _below(text) if _of_a_file(record) else printable(text)

    def formatException(self, ei: Any) -> str:  # noqa: N802  # the base class's name
        """A line below each."""
        return "  " + _below(super().formatException(ei))


class JsonLines(logging.Formatter):
    """time (UTC), level, logger, message, traceback where there is one; fit for terminals, as jq -r shows it raw."""

    def format(self, record: logging.LogRecord) -> str:
        """One entry: one line of ASCII."""
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _fit(record.getMessage()) if _of_a_file(record) else printable(record.getMessage()),
        }
        if record.exc_info:
            entry["traceback"] = _fit(self.formatException(record.exc_info))
        return json.dumps(entry)


class PlainLines(logging.Formatter):
    """The program's name and the message."""

    def __init__(self, program: str) -> None:
        super().__init__(f"{program}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  # the base class's name
        """One line."""
        return printable(super().formatMessage(record))


def configure(chosen: Format, level: int = logging.INFO) -> None:
    """To be called once, before anything is logged."""
    handler = logging.StreamHandler(sys.stderr)
    as_json = chosen is Format.JSON or (chosen is Format.AUTO and _to_the_journal())
    handler.setFormatter(JsonLines() if as_json else TextLines())
    logging.basicConfig(level=level, handlers=[handler])


def plain(program: str, level: int) -> None:
    """The same for a program that hardly logs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainLines(program))
    logging.basicConfig(level=level, handlers=[handler])


def in_force() -> Format:
    """What `configure` came to: for a process that is to write likewise."""
    written = (handler.formatter for handler in logging.getLogger().handlers)
    return Format.JSON if any(isinstance(formatter, JsonLines) for formatter in written) else Format.TEXT


def say(line: str, level: int = logging.INFO) -> None:
    """A bare line for people, the program's own word beside the log; in JSON an entry like any other."""
    if in_force() is Format.JSON:
        logging.getLogger("gpuwarden").log(level, line)
    else:
        print(_fit(line), file=sys.stderr, flush=True)


def _of_a_file(record: logging.LogRecord) -> bool:
    return any(isinstance(argument, MistakesError) for argument in record.args or ())


def _fit(text: str) -> str:
    """Its line breaks are ours."""
    return "\n".join(map(printable, text.split("\n")))


def _below(text: str) -> str:
    return _BELOW.join(map(printable, text.split("\n")))


def _to_the_journal() -> bool:
    """systemd names the stream that it connected; whoever redirects stderr elsewhere is not writing to it."""
    status = os.fstat(2)
    return os.environ.get("JOURNAL_STREAM") == f"{status.st_dev}:{status.st_ino}"
