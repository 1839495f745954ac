# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Man pages and completions say what the parsers understand."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from agent.core.errors import EXIT_CODES
from tools.manual import roff
from tools.manual.__main__ import PACKAGING, described, files
from tools.manual.arguments import commands
from tools.manual.pages import pages

FILES = files()


def parser() -> argparse.ArgumentParser:
    """One with what is awkward in it."""
    made = argparse.ArgumentParser(prog="odd")
    made.add_argument("-s", "--set", metavar="X", default="100 %", help=r"a back\slash, %(default)s, an → arrow")
    made.add_argument("--hidden", help=argparse.SUPPRESS)
    below = made.add_subparsers(metavar="COMMAND")
    policy = below.add_parser("policy", help="about policies").add_subparsers(metavar="COMMAND")
    policy.add_parser("init", help="write one").add_argument("file", help="where; .yaml at its end")
    return made


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGING)))
def test_the_committed_file_is_the_generated_one(path: Path) -> None:
    assert path.read_text() == FILES[path], "run: make docs"


def test_nothing_else_lies_beside_them() -> None:
    there = {path for folder in ("man", "completions") for path in (PACKAGING / folder).rglob("*") if path.is_file()}
    assert there == set(FILES)


def test_every_command_and_option_is_in_the_page() -> None:
    for prog, name in zip(described(), ("gpuwarden.8", "gputop.1"), strict=True):
        page = FILES[PACKAGING / "man" / name].replace(r"\-", "-")
        for command in commands(prog):
            assert not command.path or f'.SS "\\fB{" ".join(command.path)}' in page
            for option in command.options:
                assert all(rf"\fB{word}\fR" in page for word in option.option_strings)


def test_the_page_has_the_options_that_the_demo_reads_itself() -> None:
    page = FILES[PACKAGING / "man/gpuwarden.8"]
    assert r"\fB\-\-plain\fR" in page.partition('.SS "\\fBdemo')[2].partition(".SH")[0]


def test_commands_of_commands_are_in_the_page_and_what_is_hidden_is_not() -> None:
    page = pages(parser(), parser())["gpuwarden.8"]
    assert r'.SS "\fBpolicy init\fR \fIFILE\fR"' in page
    assert "hidden" not in page
    assert r"a back\eslash, 100 %, an \[u2192] arrow" in page


@pytest.mark.parametrize("text", [".SH", "'x", "a " * 50 + ".b", "-1\n.x"])
def test_no_text_is_taken_for_roff(text: str) -> None:
    lines = roff.plain(text).split("\n")
    assert not any(line.startswith((".", "'")) for line in lines)
    assert max(map(len, lines)) < 80


def test_the_exit_codes_are_those_of_the_one_table() -> None:
    for page in pages(parser(), parser()).values():
        section = " ".join(page[page.index('.SH "EXIT STATUS"') :].replace(r"\-", "-").split())
        assert all(rf"\fB{code}\fR {meaning}" in section for code, meaning in EXIT_CODES)
