# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is written on stderr: for people, and for machines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import PolicyError, SetupError
from agent.core.logs import JsonLines, TextLines
from agent.core.text import printable

NASTY = "\x1b[31mevil\u202egnp.exe\udcff"
CHILD = """
import logging, os
from agent.core import logs
status = os.fstat(2)
if {journal}:
    os.environ["JOURNAL_STREAM"] = f"{{status.st_dev}}:{{status.st_ino}}"
logs.configure(logs.Format("{chosen}"))
logging.getLogger("agent.x").warning("%s is gone", "chat")
logs.say("ready")
print(logs.in_force())
"""


def record(message: str, *arguments: object) -> logging.LogRecord:
    try:
        raise ValueError("no such thing")
    except ValueError:
        return logging.LogRecord("agent.x", logging.ERROR, __file__, 1, message, arguments, sys.exc_info())


def test_a_line_of_json_has_time_level_logger_message_and_traceback() -> None:
    line = JsonLines().format(record("%s: no answer", "chat"))
    entry = json.loads(line)
    assert "\n" not in line
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "agent.x", "chat: no answer")
    assert entry["time"].endswith("+00:00")
    assert entry["traceback"].endswith("ValueError: no such thing")


@given(st.text() | st.text().map("\n{}".format))
def test_a_name_is_shown_in_either_format_and_never_obeyed(name: str) -> None:
    text = TextLines().format(record("%s", name))
    first, *below = text.split("\n")
    assert all(line.isprintable() for line in (first, *below))
    assert len(below) == TextLines().format(record("chat")).count("\n")
    line = JsonLines().format(record("%s", name))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["message"] == printable(name)


def test_a_name_with_line_breaks_forges_no_entry() -> None:
    forged = "/tmp/x\n2026-01-01 00:00:00,000 INFO gpuwarden: all is well/libcuda.so.1"
    names = (Path(forged), SetupError(forged))
    plain = logging.LogRecord("agent.x", logging.WARNING, __file__, 1, "%s: %s", names, None)
    assert len(TextLines().format(plain).split("\n")) == 1
    try:
        raise SetupError(forged)
    except SetupError:
        failed = logging.LogRecord("agent.x", logging.ERROR, __file__, 1, "failed", (), sys.exc_info())
    _, *below = TextLines().format(failed).split("\n")
    assert all(line.startswith("  ") for line in below)


def test_a_policys_mistakes_have_a_line_each() -> None:
    error = PolicyError(["policy.yaml:5: wrong", "policy.yaml:8: wrong as well"])
    refused = logging.LogRecord("agent.x", logging.ERROR, __file__, 1, "not reloaded: %s", (error,), None)
    first, second = TextLines().format(refused).split("\n")
    assert first.endswith("not reloaded: policy.yaml:5: wrong")
    assert second == "  policy.yaml:8: wrong as well"


def test_a_name_that_is_no_utf8_is_written_too() -> None:
    assert r"\x1b[31mevil\u202egnp.exe\xff" in TextLines().format(record("%s", NASTY))
    assert JsonLines().format(record("%s", NASTY)).isascii()


@pytest.mark.parametrize(
    ("chosen", "journal", "as_json"),
    [("auto", False, False), ("auto", True, True), ("text", True, False), ("json", False, True)],
)
def test_json_goes_to_the_journal_and_text_elsewhere_unless_chosen(chosen: str, journal: bool, as_json: bool) -> None:
    child = [sys.executable, "-c", CHILD.format(chosen=chosen, journal=journal)]
    done = subprocess.run(child, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ("json\n" if as_json else "text\n")
    lines = done.stderr.splitlines()
    if as_json:
        assert [json.loads(line)["message"] for line in lines] == ["chat is gone", "ready"]
    else:
        assert lines[0].endswith(" WARNING agent.x: chat is gone")
        assert lines[1:] == ["ready"]


CLOSED = """
import os, sys
from agent.core import logs
logs.open_standard_streams()
logs.configure(logs.Format.AUTO)
logs.say("to a closed stream")
print("to a closed stream", flush=True)
opened = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT)
os.write(opened, f"{opened} {sys.stdin.read()!r} {[os.get_inheritable(number) for number in range(3)]}".encode())
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_program_whose_caller_closed_its_streams_runs_and_opens_no_file_in_their_place(
    closed: str, tmp_path: Path
) -> None:
    written = tmp_path / "written"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", CLOSED, str(written)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, cwd=Path(__file__).parents[4])
    assert done.returncode == 0
    opened, rest = written.read_text().split(" ", 1)
    assert int(opened) > 2
    assert rest == "'' [True, True, True]"
