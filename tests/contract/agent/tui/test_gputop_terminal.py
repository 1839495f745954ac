# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gputop on a real pseudo-terminal: it takes the screen over and always gives it back."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.latency import gputop
from tools.harness.wait import until

ROOT = Path(__file__).parents[4]
PROGRAM = """
import argparse, dataclasses, sys, time
from gpuwarden.top import run
from gpuwarden.top import add_arguments
from tests.support.snapshots import rich_snapshot
parser = argparse.ArgumentParser()
add_arguments(parser)
sys.exit(run(parser.parse_args(), lambda: dataclasses.replace(rich_snapshot(), at_ns=time.monotonic_ns())))
"""
ENTER, LEAVE, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"
ENVIRONMENT = {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}


class Terminal:
    """A program on a terminal of 100 x 30."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (30, 100))
        self.modes = termios.tcgetattr(self.master)
        command = [sys.executable, "-c", PROGRAM, *words]
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=ENVIRONMENT, start_new_session=True
        )
        os.close(slave)
        self.seen = b""

    def until(self, text: bytes) -> None:
        """Reads what the program writes, until this is in it."""
        until(
            lambda: text in self.seen or (self._read(0.1) and text in self.seen),
            lambda: f"{text!r} on the terminal: {self.seen!r}",
        )

    def end(self) -> int:
        """Reads what the program writes until it ends; its exit status."""
        until(lambda: not self._read(0.05) and self.process.poll() is not None, "the program's end")
        while self._read(0.2):
            pass
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)

    def _read(self, seconds: float) -> bool:
        if not select.select([self.master], [], [], seconds)[0]:
            return False
        try:
            self.seen += os.read(self.master, 65536)
        except OSError:  # the last one on the terminal has gone
            return False
        return True


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal("--interval", "0.1")
    yield made
    made.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_terminal_is_given_back_whatever_ends_it(terminal: Terminal, number: signal.Signals, code: int) -> None:
    terminal.until(b"trainer")
    assert ENTER in terminal.seen
    terminal.process.send_signal(number)
    assert terminal.end() == code
    assert LEAVE in terminal.seen.rpartition(ENTER)[2]
    assert SHOW_CURSOR in terminal.seen.rpartition(LEAVE)[2] + terminal.seen.rpartition(ENTER)[2]
    assert b"Traceback" not in terminal.seen
    assert termios.tcgetattr(terminal.master) == terminal.modes


def test_a_resized_terminal_is_redrawn(terminal: Terminal) -> None:
    terminal.until(b"trainer")
    assert b"RUNTIME/POD" not in terminal.seen
    termios.tcsetwinsize(terminal.master, (30, 190))
    terminal.process.send_signal(signal.SIGWINCH)  # as the kernel does where it is the session's own terminal
    terminal.until(b"RUNTIME/POD")


def test_no_color_writes_no_colour() -> None:
    terminal = Terminal("--once", "--no-color")
    assert terminal.end() == 0
    assert b"trainer" in terminal.seen
    assert b"\x1b[3" not in terminal.seen
    terminal.close()


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_reader_that_has_seen_enough_ends_it_quietly(words: list[str]) -> None:
    command = [sys.executable, "-c", PROGRAM, "--interval", "0.1", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_into_a_pipe_there_are_plain_lines() -> None:
    command = [sys.executable, "-c", PROGRAM, "--once"]
    out = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=60, check=True).stdout
    assert b"\x1b" not in out
    assert b"containerd/batch/train-0" in out


def test_without_stdin_there_are_plain_lines() -> None:
    command = ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, "-c", PROGRAM, "--once"]
    assert b"trainer" in subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=60, check=True).stdout


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "import time; time.sleep(60)"])
def test_the_bench_does_not_measure_what_does_not_draw(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gputop, "_PROGRAM", program)
    monkeypatch.setattr(gputop, "_WARM_UP_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match=r"gputop has (ended with 3|drawn no container)"):
        gputop.cpu_ratio((1, 2, 4), 0.1)
