# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""pydantic's errors as problems: one for each mistake, at its position, with what to write instead."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import pytest
from pydantic import BeforeValidator, Field

from agent.config.sections import FileFormat, Section, describe, example, mistake, show, unquoted_mistake, value_mistake
from agent.config.validation import MAX_BYTES, Checked, read_text
from agent.config.yaml_source import Problem, YamlPosition
from agent.core.errors import WebConfigError


def _lower_case(value: object) -> object:
    if value != str(value).lower():
        raise mistake("is not lower case", "write it so")
    return value


def _harmless(value: object) -> object:
    if "secret" in str(value):
        raise unquoted_mistake("holds a secret", "leave it out")
    return value


class Inner(Section):
    """A section below another."""

    port: Annotated[int, Field(ge=1, le=9)] = Field(examples=[8])
    ratio: Annotated[float, Field(ge=0.5, le=2, allow_inf_nan=False)] = 1.0


class Outer(Section):
    """The whole file."""

    name: Annotated[str, BeforeValidator(_lower_case), BeforeValidator(_harmless)]
    kind: Literal["fast", "slow"] = "fast"
    on: bool = False
    inner: Inner | None = None
    many: list[Inner] = Field(default=[])


class Sealed(Outer):
    """The same, where nothing that is empty is a value."""

    no_value: ClassVar[tuple[object, ...]] = (None, "", [], {})


OPEN = FileFormat(Outer, "the thing", "the thing is empty; write name: it")
SECRET = FileFormat(Sealed, "the thing", "the thing is empty; write name: it", secret=True)


def texts(form: FileFormat[Outer] | FileFormat[Sealed], text: str) -> list[str]:
    return [f"{problem.place.line}:{problem.place.column} {problem.text}" for problem in form.parse(text)[2]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "1:1 the thing is empty; write name: it"),
        (
            "- a\n",
            "1:1 the thing: a list is not a mapping; write the keys name, kind, on, inner, many below it, indented",
        ),
        ("kind: fast\n", "1:1 the thing has no name; write name: ..."),
        ("nmae: x\n", "1:1 nmae: unknown key; did you mean name?"),
        ("name: x\nport: 3\n", "2:1 port: unknown key; write it below inner"),
        ("name: x\nzzz: 3\n", "2:1 zzz: unknown key; write one of: name, kind, on, inner, many"),
        ("name:\n", "1:1 name has no value; write one or leave the key out"),
        ("name: Ab\n", "1:7 name: 'Ab' is not lower case; write it so"),
        ("name: secret\n", "1:7 name holds a secret; leave it out"),
        ("name: x\nkind: fats\n", "2:7 kind: 'fats' is unknown; did you mean fast? write one of: fast, slow"),
        ("name: x\non: yes\n", "2:5 on: 'yes' is neither true nor false; write true or false, without quotes"),
        ("name: x\ninner: {}\n", "2:1 inner has no port; write port: 8"),
        ("name: x\ninner: {port: 10}\n", "2:15 inner.port: 10 is out of range; write a number from 1 to 9"),
        ("name: x\ninner: {port: 1.5}\n", "2:15 inner.port: 1.5 is not a whole number; write one such as 8"),
        (
            "name: x\ninner: {port: 1, ratio: .nan}\n",
            "2:25 inner.ratio: nan is out of range; write a number from 0.5 to 2",
        ),
        ("name: x\nmany: 3\n", "2:7 many: 3 is not a list; write entries that begin with '- ' below it"),
        ("name: x\nmany:\n  - port: a\n", "3:11 many[0].port: 'a' is not a whole number; write one such as 8"),
    ],
)
def test_each_mistake_names_its_position_its_key_its_value_and_what_to_write(text: str, message: str) -> None:
    assert texts(OPEN, text) == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: {VERYSECRET: 1}\n", "1:1 name is not lower case; write it so"),
        ("name: ''\n", "1:1 name has no value; write one or leave the key out"),
        ("name: x\non: VERYSECRET\n", "2:1 on is neither true nor false; write true or false, without quotes"),
        ("name: x\ninner: VERYSECRET\n", "2:1 inner is not a mapping; write the keys port, ratio below it, indented"),
    ],
)
def test_where_a_file_may_hold_secrets_no_value_is_repeated_and_the_position_is_the_keys(
    text: str, message: str
) -> None:
    assert texts(SECRET, text) == [message]


def test_a_value_from_elsewhere_is_checked_alone() -> None:
    assert value_mistake(Inner, "port", 3) is None
    assert value_mistake(Inner, "ratio", 3) == "3 is out of range; write a number from 0.5 to 2"
    assert value_mistake(Inner, "ratio", None) == "has no value; write one or leave the key out"


def test_keys_are_described_from_their_annotations() -> None:
    kind, on, port = Outer.model_fields["kind"], Outer.model_fields["on"], Inner.model_fields["port"]
    assert [describe(info) for info in (kind, on, port)] == [
        "one of fast, slow",
        "true or false",
        "whole number, 1 to 9",
    ]
    assert [example(info) for info in (kind, on, port)] == ["fast", "true", "8"]
    assert (show(kind, "slow"), show(on, False), show(Inner.model_fields["ratio"], 1.0)) == ("slow", "false", "1")


def test_a_checked_file_gives_its_value_or_raises_every_mistake() -> None:
    assert Checked("f", WebConfigError, value=3).accepted() == 3
    wrong: Checked[int] = Checked("f", WebConfigError, (Problem(YamlPosition(2), "a"), Problem(YamlPosition(3), "b")))
    with pytest.raises(WebConfigError) as caught:
        wrong.accepted()
    assert caught.value.problems == ["f:2: a", "f:3: b"]


def test_what_cannot_be_read_is_a_problem_and_may_pass(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "bytes").write_bytes(b"a: b\n# \xff\n")
    found = {name: read_text(tmp_path / name, strict=False) for name in ("pipe", "large", "bytes", "none", "a\0b")}
    problems = {name: read.problem.text.split(";")[0] for name, read in found.items() if read.problem is not None}
    assert problems == {
        "pipe": "is not a regular file",
        "large": "is larger than 1 MiB",
        "bytes": "is not UTF-8 text",
        "none": "cannot be read (No such file or directory)",
        "a\0b": "cannot be read (embedded null byte)",
    }
    assert [name for name, read in found.items() if not read.was_read] == ["none", "a\0b"]
    assert found["bytes"].problem == Problem(YamlPosition(2), "is not UTF-8 text; save the file as UTF-8")


def test_a_file_that_others_can_write_is_refused_or_reported_as_exposed(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("a: b\n")
    path.chmod(0o666)
    assert read_text(path, strict=True).problem is not None
    read = read_text(path, strict=False)
    assert (read.text, read.problem) == ("a: b\n", None)
    assert "can be written by every user" in (read.exposed or "")
