# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gputop where it prints: once, as JSON, or tick after tick into a pipe, until the source or the reader ends."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from rich.console import Console

from agent import schema
from agent.model import Snapshot
from agent.tui import palette
from agent.tui.recording import EndOfRecording, Source
from agent.tui.screen import render

PLAIN_WIDTH: Final = 200  # into a pipe or a file: everything, since nothing there wraps
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def is_plain(options: argparse.Namespace) -> bool:
    """Whether there is no terminal to take over (textual reads stdin and draws on stderr), or none is wanted."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    on_terminal = all(stream is not None and stream.isatty() for stream in streams)  # None: it was closed
    return bool(options.once or options.json) or not on_terminal or Console().is_dumb_terminal


def show(options: argparse.Namespace, source: Source, *, alone: bool) -> int:
    """Prints what the source gives until it ends or the user does. The exit status."""
    console = _console(options)
    try:
        with _ended_by_signals(), contextlib.suppress(KeyboardInterrupt, EndOfRecording):
            before: int | None = None
            for _ in ticks(options.interval, time.sleep):
                snapshot = source()
                if not options.json:
                    console.print(render(snapshot, options.view, alone=alone))
                elif snapshot.at_ns != before:
                    _print_json(console, snapshot)
                before = snapshot.at_ns
                if options.once:
                    break
    except BrokenPipeError:  # the reader has seen enough, as "head" does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
    return 0


def ticks(interval: float, wait: Callable[[float], object]) -> Iterator[None]:
    """Now, and then every `interval` seconds; ticks that were missed are not made up for."""
    due = time.monotonic()
    while True:
        yield
        now = time.monotonic()
        due = max(due + interval, now)
        wait(due - now)


def _print_json(console: Console, snapshot: Snapshot) -> None:
    console.file.write(schema.dumps(snapshot) + "\n")
    console.file.flush()


class _PipeConsole(Console):
    """rich ends the program with status 1 when the reader of a pipe leaves; that is no failure of ours."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(options: argparse.Namespace) -> Console:
    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _PipeConsole(
        no_color=options.no_color or None,
        highlight=False,
        soft_wrap=False,
        width=PLAIN_WIDTH if plain else None,
        theme=palette.theme(options.light or palette.is_light(os.environ)),
    )


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the program through the finally blocks, which a second one cannot break off."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _end) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _frame: Any) -> None:
    for other in ENDING:
        signal.signal(other, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
