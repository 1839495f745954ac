# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One table of exit codes: every error ends with one that is in it, and --help prints it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from agent.core.errors import EXIT_CODES, WardenError
from gpuwarden.main import gputop, main


def errors(kind: type[WardenError]) -> Iterator[type[WardenError]]:
    yield kind
    for below in kind.__subclasses__():
        yield from errors(below)


def test_every_error_ends_with_a_code_that_is_in_the_table() -> None:
    codes = [code for code, _ in EXIT_CODES]
    assert sorted(set(codes)) == codes
    assert {kind.exit_code for kind in errors(WardenError)} == {1, 2, 3, 4, 5} < set(codes)


@pytest.mark.parametrize("command", [main, gputop])
def test_help_ends_with_the_table(
    command: Callable[[Sequence[str]], NoReturn], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()[-len(EXIT_CODES) :]
    assert [tuple(line.split(maxsplit=1)) for line in lines] == [(str(code), meaning) for code, meaning in EXIT_CODES]


@pytest.mark.parametrize("arguments", [["nonsense"], ["run", "--log-format", "xml"], ["plan", "--interval", "0"]])
def test_a_wrong_command_line_is_exit_code_2(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("seconds", ["-1", "0", "nan", "inf", "1e300"])
def test_a_plan_takes_no_time_that_makes_no_sense(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"--seconds={seconds}"])
    assert ended.value.code == 2
    assert f"--seconds {float(seconds)}: give seconds between 0.1 and 3600" in capsys.readouterr().err


def test_the_documented_table_is_this_one() -> None:
    documented = (Path(__file__).parents[3] / "docs/running.md").read_text()
    assert documented.endswith("".join(f"| {code} | {meaning} |\n" for code, meaning in EXIT_CODES))
