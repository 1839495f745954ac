# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The web configuration's file over time: its terms, and those of what takes its place.

It and the certificates are looked at with `stat` at each connection. Invariant: what is wrong, gone or still being
written changes nothing that is in force; the log and a metric say so until it is right again.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from agent import yaml_source
from agent.errors import TrustError, WebConfigError
from agent.trusted import read_trusted
from agent.webconfig.contexts import MOST_BYTES, Making
from agent.webconfig.passwords import Passwords
from agent.webconfig.schema import WebSection, complaints, entries, label
from agent.webconfig.terms import Terms
from agent.yaml_source import Place, Problem, Source

_log = logging.getLogger(__name__)
SETTLED_SECONDS: Final = 1.0  # a file that was changed since may not be whole yet
_MOST_READINGS: Final = 3
_EMPTY: Final = "the file is empty; write tls_server_config, basic_auth_users or both"
Stamp = tuple[int, int, int, int, int] | None


@dataclass(frozen=True, slots=True)
class Judged:
    """A web configuration: its terms, or what is wrong, in file order. `files`: whatever it was made of.

    `unread`: one of them could not be read now, which may pass without any of them changing.
    """

    name: str
    problems: tuple[Problem, ...]
    terms: Terms | None = None
    files: tuple[Path, ...] = ()
    unread: bool = False

    def accepted(self) -> Terms:
        """The terms. Raises WebConfigError with all mistakes."""
        if self.terms is None:
            raise WebConfigError([f"{self.name}:{problem.place.line}: {problem.text}" for problem in self.problems])
        return self.terms


def examine(path: Path) -> Judged:
    """What is in the file and in those that it names. Never raises."""
    try:
        text = read_trusted(path, MOST_BYTES).decode("utf-8").removeprefix("\ufeff")
    except TrustError as error:
        return _unfit(path, str(error).removeprefix(f"{path} "))
    except UnicodeDecodeError:
        return _unfit(path, "is not UTF-8 text; save the file as UTF-8")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or error
        return _unfit(path, f"cannot be read ({reason}); check the path and its permissions", unread=True)
    return _judge(text, path)


def _unfit(path: Path, text: str, unread: bool = False) -> Judged:
    return Judged(str(path), (Problem(Place(), text),), files=(path,), unread=unread)


def _judge(text: str, path: Path) -> Judged:
    source = yaml_source.read(text)
    problems = list(source.problems)
    section = None
    if source.data is not None:
        try:
            section = WebSection.model_validate(source.data)
        except ValidationError as error:
            problems += complaints(error, source)
    elif not problems:
        problems.append(Problem(Place(), _EMPTY))
    if section is None:
        return Judged(str(path), tuple(sorted(problems)), files=(path,))
    return _made(section, source, problems, path)


def _made(section: WebSection, source: Source, problems: list[Problem], path: Path) -> Judged:
    problems += entries(section, source)
    context, sans, unread = None, None, False
    files: tuple[Path, ...] = (path,)
    if section.tls_server_config is not None:
        making = Making(section.tls_server_config, path.parent)
        context, sans = making.context(), making.sans()
        files, unread = (path, *making.files), making.unread
        for key, text in making.problems.items():
            where = ("tls_server_config", key)
            problems.append(Problem(source.key_place(where), f"{label(where)} {text}"))
    if problems:
        return Judged(str(path), tuple(sorted(problems)), files=files, unread=unread)
    users = section.basic_auth_users
    headers = tuple((name, value) for name, value in section.http_server_config.headers.items() if value)
    return Judged(str(path), (), Terms(context, sans, Passwords(users) if users else None, headers), files)


class WebConfigFile:
    """One path, and what is in force of it. Raises WebConfigError where it is wrong from the beginning.

    `reloaded_wall`: when what is in force was read, in seconds; `error`: why what is there now is not.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mutex = threading.Lock()
        self._files: tuple[Path, ...] = (path,)
        self._stamps: tuple[Stamp, ...] | None = None  # of these files, when they were read last
        self.error: WebConfigError | None = None
        self._terms = self._read()
        self.reloaded_wall = time.time()

    def terms(self) -> Terms:
        """Those in force now. For any thread."""
        with self._mutex:
            if self._changed():
                self._reload()
            return self._terms

    def rows(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """For the metrics."""
        yield "gpuwarden_web_config_reload_success", (), self.error is None
        yield "gpuwarden_web_config_reload_timestamp_seconds", (), self.reloaded_wall

    def _changed(self) -> bool:
        return (stamps := _stamps(self._files)) != self._stamps and _settled(stamps, time.time())

    def _reload(self) -> None:
        before = str(self.error)
        try:
            self._terms = self._read()
        except WebConfigError as error:
            self.error = error
            if str(error) != before:  # a file that cannot be read is tried at each connection
                _log.error("web configuration not reloaded, the old one stays in force: %s", error)
            return
        self.error, self.reloaded_wall = None, time.time()
        _log.info("web configuration reloaded: %s", self._terms)

    def _read(self) -> Terms:
        for _ in range(_MOST_READINGS):
            stamps = _stamps(self._files)  # before they are read: whoever writes later has changed them
            judged = examine(self.path)
            files = judged.files if judged.terms is not None or len(judged.files) > 1 else self._files
            if files == self._files:
                break
            self._files = files  # it names others now: these were not looked at before
        self._stamps = None if judged.unread else stamps
        return judged.accepted()


def _stamps(files: Iterable[Path]) -> tuple[Stamp, ...]:
    return tuple(map(_stamp, files))


def _stamp(path: Path) -> Stamp:
    """None: there is none."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def _settled(stamps: Iterable[Stamp], now: float) -> bool:
    """Whether nobody was at work on them just now. What was changed in the future says nothing about that."""
    ages = (now - stamp[-1] / 1e9 for stamp in stamps if stamp is not None)
    return not any(0 <= age < SETTLED_SECONDS for age in ages)
