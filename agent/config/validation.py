# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A configuration file read and validated in one pass: the value that it means, or every mistake in it.

The file is judged through the descriptor that is read, so what was judged is what is used. Each mistake has a
position and says what to write instead, and is reported once: a misspelt required key is not also reported as missing,
nor is a value that the YAML reader had to drop. Where the file may hold secrets no message repeats a value.

`WatchedFile` keeps the value of the last right reading: a file that is wrong, gone or still being written does not
change it. Files are compared by `stat`, which follows links: an edit in place, a rename over it and a ConfigMap's
swapped `..data` all show as another stamp. inotify would need a watch on every directory that a link leads through, set
anew after each swap, and reports nothing on network file systems.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Generic, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from agent.config import trusted_file, yaml_source
from agent.config.sections import UNQUOTED_MISTAKE, Section, bounds, choices, example, is_list, quote, section_of
from agent.config.yaml_source import KeyPath, Problem, Source, YamlPosition
from agent.core.errors import MistakesError

MAX_BYTES = 1 << 20
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,59}")
_OUT_OF_RANGE = {"greater_than_equal", "less_than_equal", "finite_number"}
T = TypeVar("T")
S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class Checked(Generic[T]):
    """The outcome of checking one file: its value, or what is wrong with it, in file order."""

    name: str  # as messages call it
    refusal: type[MistakesError]
    problems: tuple[Problem, ...] = ()
    value: T | None = None
    text: str = ""  # for excerpts; empty where it may hold secrets
    source: Source = field(default_factory=Source)  # the position of everything in it
    files: tuple[Path, ...] = ()  # it and all that it names
    was_read: bool = True  # false: one of them could not be read, which may pass without any of them changing
    exposed: str | None = None  # who besides its owner could change it, and so what the agent does

    def accepted(self) -> T:
        """The value. Raises `refusal` with all mistakes."""
        if self.value is None:
            raise self.refusal([f"{self.name}:{problem.place.line}: {problem.text}" for problem in self.problems])
        return self.value


@dataclass(frozen=True, slots=True)
class FileText:
    """What reading a file came to: its text, or the problem."""

    text: str = ""
    problem: Problem | None = None
    was_read: bool = True
    exposed: str | None = None


@dataclass(frozen=True, slots=True)
class FileFormat(Generic[S]):
    """One kind of configuration file: its schema and the words that its messages use."""

    root: type[S]
    name: str  # of the whole, as a message's subject: "the policy"
    empty: str  # the message for a file without content
    secret: bool = False  # values are not repeated in messages, and problems are at keys: a width tells a length

    def parse(self, text: str) -> tuple[S | None, Source, list[Problem]]:
        """The validated sections, None where there are problems that pydantic or the YAML reader found."""
        source = yaml_source.read(text)
        problems = list(source.problems)
        if source.data is None:
            return None, source, problems or [Problem(YamlPosition(), self.empty)]
        try:
            return self.root.model_validate(source.data), source, problems
        except ValidationError as error:
            return None, source, problems + self._problems(error.errors(include_url=False), source)

    def label(self, path: KeyPath) -> str:
        """('online', 0, 'slo') → online[0].slo; () → the name of the whole."""
        steps = (f"[{step}]" if isinstance(step, int) else f".{_plain(step)}" for step in path)
        return "".join(steps).removeprefix(".") or self.name

    def _problems(self, errors: list[ErrorDetails], source: Source) -> list[Problem]:
        """One Problem for each mistake that pydantic found."""
        misspelt = {near for error in errors if _is_unknown_key(error) and (near := self._meant(error["loc"]))}
        kept = [error for error in errors if not (error["type"] == "missing" and error["loc"] in misspelt)]
        return [
            Problem(self.position(error["loc"], source, _is_unknown_key(error)), self._text(error))
            for error in kept
            if error["loc"] not in source.broken
        ]

    def position(self, path: KeyPath, source: Source, at_key: bool = False) -> YamlPosition:
        """Of the value at a path; of its key for an unknown key, and in a file that may hold secrets."""
        return source.key_place(path) if at_key or self.secret else source.place(path)

    def _text(self, error: ErrorDetails) -> str:
        path: KeyPath = error["loc"]
        if error["type"] == "missing":
            return self._missing(path)
        if _is_unknown_key(error):
            return self._unknown_key(path)
        label, value = self.label(path), error["input"]
        subject = label if self.secret or error["type"] == UNQUOTED_MISTAKE else f"{label}: {quote(value)}"
        return f"{subject} {self.what(error)}"

    def what(self, error: ErrorDetails) -> str:
        """What is wrong with a value, and what to write instead."""
        path, kind = error["loc"], error["type"]
        section, info = self.section_at(path), self._field_at(path)
        match kind:
            case "string_type":
                return "is not text; write it in quotes"
            case "bool_type":
                return "is neither true nor false; write true or false, without quotes"
            case "list_type":
                return "is not a list; write entries that begin with '- ' below it"
            case "model_type" | "dict_type":
                keys = f"the keys {', '.join(section.model_fields)}" if section else "its entries as name: value"
                return f"is not a mapping; write {keys} below it, indented"
            case "literal_error" if info is not None:
                return _not_among(choices(info), error["input"])
            case "int_type" | "float_type" if info is not None:
                noun = "whole number" if kind == "int_type" else "number"
                return f"is not a {noun}; write one such as {example(info)}"
            case _ if kind in _OUT_OF_RANGE and info is not None:
                return f"is out of range; write a number from {bounds(info)}"
            case _:
                return error["msg"]

    def _missing(self, path: KeyPath) -> str:
        key, parent = str(path[-1]), self.label(path[:-1])
        info = self._field_at(path)
        inner = section_of(info) if info else None
        if inner is not None:
            return f"{parent} has no {key}; write {key}: with the keys {', '.join(inner.model_fields)} below it"
        return f"{parent} has no {key}; write {key}: {example(info) if info else '...'}"

    def _unknown_key(self, path: KeyPath) -> str:
        meant = self._meant(path)
        section = self.section_at(path[:-1])
        cure = f"write one of: {', '.join(section.model_fields) if section else ''}"
        if meant is not None:
            cure = f"did you mean {meant[-1]}?" if len(meant) == len(path) else f"write it below {meant[-2]}"
        return f"{self.label(path)}: unknown key; {cure}"

    def _meant(self, path: KeyPath) -> KeyPath | None:
        """The path with the nearest key that the section knows, or of the same key in a section below it."""
        section = self.section_at(path[:-1])
        if section is None:
            return None
        for key, info in section.model_fields.items():
            inner = section_of(info)
            if inner is not None and not is_list(info) and path[-1] in inner.model_fields:
                return (*path[:-1], key, path[-1])
        near = get_close_matches(str(path[-1]).lower(), list(section.model_fields), n=1, cutoff=0.6)
        return (*path[:-1], near[0]) if near else None

    def section_at(self, path: KeyPath) -> type[Section] | None:
        """The section that describes the mapping at `path`; None where there is none (a scalar, a label)."""
        section: type[Section] | None = self.root
        for step in path:
            if isinstance(step, str):
                info = section.model_fields.get(step) if section is not None else None
                section = section_of(info) if info is not None else None
        return section

    def _field_at(self, path: KeyPath) -> FieldInfo | None:
        """The key that holds the value at `path`, itself or in a list."""
        while path and isinstance(path[-1], int):
            path = path[:-1]
        section = self.section_at(path[:-1]) if path else None
        return section.model_fields.get(str(path[-1])) if section is not None else None


def value_mistake(section: type[Section], key: str, value: object) -> str | None:
    """What is wrong with one value of a key that comes from elsewhere than a file; None: nothing."""
    try:
        section.model_validate({key: value})
    except ValidationError as error:
        found = (one for one in error.errors(include_url=False) if one["loc"][0] == key and one["type"] != "missing")
        if (wrong := next(found, None)) is not None:
            what = FileFormat(section, key, "").what(wrong)
            return what if wrong["type"] == UNQUOTED_MISTAKE else f"{quote(wrong['input'])} {what}"
    return None


def read_text(path: str | os.PathLike[str], strict: bool) -> FileText:
    """The text of a configuration file. Never raises: that it cannot be read is a problem too.

    `strict` refuses a file that others than root and the agent's user can write; without it `exposed` says so.
    """
    try:
        raw, status = trusted_file.read(path, MAX_BYTES)
        exposed = trusted_file.exposed(path, status)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return _unfit(f"cannot be read ({reason}); check the path and its permissions", was_read=False)
    if not stat.S_ISREG(status.st_mode):
        return _unfit("is not a regular file; name the YAML file")
    if exposed and strict:
        return _unfit(exposed)
    if len(raw) > MAX_BYTES:
        return _unfit("is larger than 1 MiB; check that it is the right file")
    try:
        return FileText(raw.decode("utf-8").removeprefix("\ufeff"), exposed=exposed)
    except UnicodeDecodeError as error:
        return _unfit("is not UTF-8 text; save the file as UTF-8", line=raw.count(b"\n", 0, error.start) + 1)


def _unfit(text: str, line: int = 1, was_read: bool = True) -> FileText:
    return FileText(problem=Problem(YamlPosition(line), text), was_read=was_read)


def _is_unknown_key(error: ErrorDetails) -> bool:
    return error["type"] == "extra_forbidden"


def _not_among(known: tuple[object, ...], value: object) -> str:
    words = [str(one) for one in known]
    near = get_close_matches(value, words, n=1) if isinstance(value, str) else []
    meant = f"did you mean {near[0]}? " if near else ""
    return f"is unknown; {meant}write one of: {', '.join(words)}"


def _plain(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else quote(key)


SETTLED_SECONDS: Final = 1.0  # a file that was changed more recently may not be complete yet
_MOST_READINGS: Final = 3
Stamp = tuple[int, int, int, int, int]  # device, inode, size, mtime and ctime in ns
Stamps = tuple[Stamp | None, ...]  # None: there is no such file, or it cannot be read
Settled = Callable[[Stamps | None, Stamps], bool]  # (at the last look, now) → whether nothing is writing to them


def unchanged_since_last_look(before: Stamps | None, now: Stamps) -> bool:
    """For a caller that looks at regular intervals: needs no clock, so that none that is set can deceive it."""
    return before == now


def older_than_a_second(_before: Stamps | None, now: Stamps) -> bool:
    """For a caller that looks at any time. A change that is dated in the future says nothing about writing."""
    ages = (time.time() - stamp[-1] / 1e9 for stamp in now if stamp is not None)
    return not any(0 <= age < SETTLED_SECONDS for age in ages)


class WatchedFile(Generic[T]):
    """`check` reads the file. `checked` is the last reading, `value` that of the last right one. Not thread-safe."""

    def __init__(self, path: Path, check: Callable[[Path], Checked[T]], settled: Settled) -> None:
        self.path = path
        self.checked: Checked[T] | None = None
        self.value: T | None = None
        self._check, self._settled = check, settled
        self._files: tuple[Path, ...] = (path,)
        self._read: Stamps = (None,)  # of what was read last; all None: not read, so that whatever exists is new
        self._seen: Stamps | None = None  # at the last look

    def exists(self) -> bool:
        """Whether there is anything to read."""
        return _stamp(self.path) is not None

    def changed(self) -> bool:
        """Whether the files differ from what was read last, and nothing is writing to them."""
        before, self._seen = self._seen, _stamps(self._files)
        return self._seen != self._read and self._settled(before, self._seen)

    def load(self) -> T:
        """Reads now. Raises the format's error with all mistakes; `value` stays as it was then."""
        for _ in range(_MOST_READINGS):
            self._read = self._seen = _stamps(self._files)  # before they are read: a later write is a change
            checked = self._check(self.path)
            files = self._files if checked.value is None and len(checked.files) <= 1 else checked.files or (self.path,)
            if files == self._files:
                break
            self._files = files  # it names others now, whose stamps were not taken
        self.checked = checked
        if not checked.was_read:
            self._read = (None,) * len(self._files)  # to be tried again: no descriptor was left, or a disk failed
        self.value = checked.accepted()
        return self.value


def _stamps(files: Iterable[Path]) -> Stamps:
    return tuple(map(_stamp, files))


def _stamp(path: Path) -> Stamp | None:
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # ValueError: a NUL in the name
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
