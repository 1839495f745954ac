# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gputop as a person sees it: a recording in tmux, which draws what a terminal would."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from agent.tui.recording import recorded
from tests.support.snapshots import rich_snapshot
from tools.harness.wait import until

ROOT = Path(__file__).parents[4]
GPUTOP = "from gpuwarden.main import gputop; gputop()"
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "LANG": "C.UTF-8", "TERM": "xterm-256color"}


class Tmux:
    """A server of its own, with one window."""

    def __init__(self, socket: Path, command: list[str]) -> None:
        binary = shutil.which("tmux")
        assert binary, "install Debian's package tmux"
        self._command = [binary, "-u", "-f", os.devnull, "-S", str(socket)]
        self._status = socket.with_name("status")
        # the shell outlives the program: tmux does not read what is left of the output of what has ended
        shell = ["sh", "-c", '"$@"; echo $? >"$0"; exec cat', str(self._status), *command]
        keep = ("set-option", "-g", "remain-on-exit", "on", ";")
        self("start-server", ";", *keep, "new-session", "-d", "-x", "80", "-y", "24", shlex.join(shell))

    def __call__(self, *words: str) -> str:
        command = [*self._command, *words]
        return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=True, timeout=30).stdout

    def press(self, key: str) -> None:
        self("send-keys", key)

    def screen(self) -> list[str]:
        return self("capture-pane", "-p").splitlines()

    def is_drawn_over(self) -> bool:
        """Whether the program has the alternate screen. What tmux 3.3a shows after it was resized there is its own."""
        return self("display-message", "-p", "#{alternate_on}").strip() == "1"

    def until(self, text: str) -> list[str]:
        """The lines of the screen once one of them has this."""

        def shown() -> list[str] | None:
            lines = self.screen()
            return lines if text in "\n".join(lines) else None

        return until(shown, lambda: "\n".join([f"{text!r} on the screen:", *self.screen()]), step_seconds=0.1)

    def end(self) -> int:
        """The exit status of what ran in the window. Not by tmux: version 3.3a now and then never reaps its child."""
        until(
            lambda: self._status.exists() and self._status.read_text(),
            lambda: "\n".join(["the end of the program in the window:", *self.screen()]),
        )
        return int(self._status.read_text())


@pytest.fixture
def tmux(tmp_path: Path) -> Iterator[Tmux]:
    file = tmp_path / "gpu.jsonl"
    ticks = iter(replace(rich_snapshot(), at_ns=second * 1_000_000_000) for second in (1, 2, 3))
    with recorded(lambda: next(ticks), file) as source:
        source(), source(), source()
    made = Tmux(tmp_path / "tmux", [sys.executable, "-c", GPUTOP, "--replay", str(file), "--interval", "3600"])
    yield made
    made("kill-server")


def test_a_person_looks_at_a_recording_in_tmux(tmux: Tmux) -> None:
    lines = tmux.until("trainer")
    assert lines[0].startswith("GPU Warden")
    assert "replay 1/3" in lines[0]
    assert lines[1].startswith("GPU 0")
    assert "CONTAINER" in "\n".join(lines)
    assert "RUNTIME/POD" not in "\n".join(lines), "there is no room for it"
    assert lines[23].startswith(" h help  q quit")

    tmux("resize-window", "-x", "190", "-y", "40")
    lines = tmux.until("RUNTIME/POD")
    assert "slack 75 %: growing by 2 % of the device" in "\n".join(lines)
    assert r"\x1b[31mevil" in "\n".join(lines), "a name is shown, not obeyed"

    tmux.press("t")
    lines = tmux.until("100 vllm serve")
    (chat,) = (number for number, line in enumerate(lines) if line.startswith("chat "))
    assert any(line.startswith("└─ 100 vllm serve") for line in lines[chat + 1 : chat + 3])

    tmux.press("2")
    lines = tmux.until("COMMAND")
    assert any(line.split()[:4] == ["200", "root", "python", "train.py"] for line in lines)

    tmux.press("End")
    tmux.until("replay 3/3")
    assert tmux.is_drawn_over()
    tmux.press("q")
    assert tmux.end() == 0
    until(lambda: not tmux.is_drawn_over(), "the terminal to be as it was")
