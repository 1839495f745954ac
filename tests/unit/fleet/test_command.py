# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet`: what it says where it cannot go on."""

from __future__ import annotations

import importlib

import pytest

from fleet import command


def test_each_command_has_a_module_and_its_help_says_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    for name, (_, summary) in command.COMMANDS.items():
        with pytest.raises(SystemExit) as ended:
            command.main([name, "--help"])
        assert ended.value.code == 0
        assert " ".join(summary.split())[1:] in " ".join(capsys.readouterr().out.split())


def test_a_package_that_is_missing_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_numpy(name: str) -> None:
        raise ModuleNotFoundError(f"No module named 'numpy', wanted by {name}", name="numpy")

    monkeypatch.setattr(importlib, "import_module", without_numpy)
    assert command.main(["plan", "--prometheus", "http://127.0.0.1:9", "--pods", "-"]) == 3
    assert "numpy is missing: `pip install 'gpuwarden[fleet]'`" in capsys.readouterr().err


def test_a_mistake_of_ours_is_no_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command.COMMANDS, "plan", ("fleet.nothing", "no such module"))
    with pytest.raises(ModuleNotFoundError, match=r"fleet\.nothing"):
        command.main(["plan"])


def test_an_error_is_one_line_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["analyse", "/nonexistent", "--format", "muri"]) == 2
    assert capsys.readouterr().err.startswith("gpuwarden fleet: ")


@pytest.mark.parametrize(("option", "least"), [("--learn-over", "10s"), ("--interval", "1s")])
def test_a_time_with_which_nothing_would_ever_be_placed_is_refused(
    option: str, least: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["serve", "--prometheus", "http://127.0.0.1:9", option, "0s"]) == 2
    assert f"{option}: write {least} or more" in capsys.readouterr().err
