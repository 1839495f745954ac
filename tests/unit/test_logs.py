# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is written on stderr: for people, and for machines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.logs import JsonLines, TextLines

NASTY = "\x1b[31mevil\u202egnp.exe\udcff"
CHILD = """
import logging, os
from agent import logs
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


@given(st.text())
def test_a_name_is_shown_in_either_format_and_never_obeyed(name: str) -> None:
    text = TextLines().format(record("%s", name))
    assert all(line.isprintable() for line in text.split("\n"))
    line = JsonLines().format(record("%s", name))
    assert line.isascii()
    assert line.isprintable()
    assert json.loads(line)["message"] == name


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
