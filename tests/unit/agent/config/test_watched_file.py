# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A watched file keeps its last right value while it is wrong, gone or being written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from agent.config.validation import Checked, WatchedFile, older_than_a_second, unchanged_since_last_look
from agent.config.yaml_source import Problem, YamlPosition
from agent.core.errors import WebConfigError


@dataclass(slots=True)
class Number:
    """A file that holds a number, and may name another file with `+NAME`."""

    path: Path
    readings: int = 0
    unreadable: bool = False
    faults: list[Exception] = field(default_factory=list)

    def check(self, path: Path) -> Checked[int]:
        self.readings += 1
        if self.faults:
            raise self.faults.pop()
        name = str(path)
        if self.unreadable or not path.exists():
            return Checked(name, WebConfigError, (Problem(YamlPosition(), "cannot be read"),), was_read=False)
        first, _, other = path.read_text().partition("+")
        named = path.with_name(other or path.name)
        files = (path, named) if other else (path,)
        if not first.isdecimal():
            return Checked(name, WebConfigError, (Problem(YamlPosition(), "is no number"),), files=files)
        more = int(named.read_text()) if other else 0
        return Checked(name, WebConfigError, value=int(first) + more, files=files)


@pytest.fixture
def number(tmp_path: Path) -> Number:
    made = Number(tmp_path / "number")
    made.path.write_text("1")
    return made


def watched(number: Number) -> WatchedFile[int]:
    return WatchedFile(number.path, number.check, unchanged_since_last_look)


def look(file: WatchedFile[int]) -> bool:
    """Two looks: the first sees the change, the second that it has settled."""
    file.changed()
    return file.changed()


def test_a_file_that_stays_the_same_is_read_once(number: Number) -> None:
    file = watched(number)
    assert file.load() == 1
    assert not any(file.changed() for _ in range(5))
    assert number.readings == 1


def test_a_change_counts_at_the_second_look_and_every_write_restarts_the_wait(number: Number) -> None:
    file = watched(number)
    file.load()
    for text in ("12", "123", "1234"):
        number.path.write_text(text)
        assert not file.changed()
    assert file.changed()
    assert file.load() == 1234


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("x"), lambda path: path.unlink()])
def test_a_wrong_or_deleted_file_keeps_the_old_value(number: Number, spoil: Callable[[Path], object]) -> None:
    file = watched(number)
    file.load()
    spoil(number.path)
    assert look(file)
    with pytest.raises(WebConfigError):
        file.load()
    assert file.value == 1
    assert file.checked is not None
    assert file.checked.value is None
    assert not look(file), "the same wrong file is not read again"
    number.path.write_text("22")
    assert look(file)
    assert file.load() == 22


def test_a_file_that_could_not_be_read_is_tried_again_though_it_has_not_changed(number: Number) -> None:
    file = watched(number)
    file.load()
    number.path.write_text("22")
    number.unreadable = True
    for _ in range(3):
        assert look(file)
        with pytest.raises(WebConfigError):
            file.load()
    number.unreadable = False
    assert look(file)
    assert file.load() == 22


def test_a_defect_while_reading_is_met_once_for_each_change(number: Number) -> None:
    file = watched(number)
    file.load()
    number.path.write_text("22")
    number.faults.append(RuntimeError("a defect"))
    assert look(file)
    with pytest.raises(RuntimeError):
        file.load()
    assert not look(file)
    assert file.value == 1


def test_the_files_that_it_names_are_watched_too(number: Number) -> None:
    other = number.path.with_name("other")
    other.write_text("10")
    file = watched(number)
    file.load()
    number.path.write_text("1+other")
    assert look(file)
    assert file.load() == 11
    other.write_text("200")
    assert look(file)
    assert file.load() == 201


def test_a_missing_file_is_no_change_until_it_appears(tmp_path: Path) -> None:
    number = Number(tmp_path / "none")
    file = watched(number)
    assert not file.exists()
    assert not any(file.changed() for _ in range(3))
    number.path.write_text("5")
    assert look(file)
    assert file.load() == 5


def test_without_regular_looks_the_age_of_the_last_change_decides(
    number: Number, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = WatchedFile(number.path, number.check, older_than_a_second)
    file.load()
    number.path.write_text("22")
    changed_wall = number.path.stat().st_ctime
    for after_seconds, taken in ((0.1, False), (0.9, False), (1.1, True), (-3600, True)):
        monkeypatch.setattr(time, "time", lambda after=after_seconds: changed_wall + after)
        assert file.changed() is taken
