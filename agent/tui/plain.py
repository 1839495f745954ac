# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gputop where it prints: once, as JSON, or tick after tick into a pipe, until the source or the reader ends.

The agent gives its last snapshot, and gputop shows each once: the two do not tick together. Without `fresh` a tick
would be shown twice or missed whenever their ticks drift past each other, and the first one, which has no rates yet,
would be all that --once ever shows.
"""

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

from agent.core import snapshot_json
from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SetupError
from agent.core.model import Snapshot
from agent.tui import cells
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
    console.file.write(snapshot_json.dumps(snapshot) + "\n")
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
        theme=cells.theme(options.light or cells.is_light(os.environ)),
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


POLL_SECONDS: Final = 0.05
FIRST_SECONDS: Final = 10.0  # a slow machine's first two ticks
Latest = Callable[[], Snapshot | None]


class Stopped(Exception):  # noqa: N818  an event, not an error
    """The snapshot is not wanted any more."""


def fresh(
    latest: Latest,
    interval: float,
    first: float = FIRST_SECONDS,
    now: Callable[[], float] = time.monotonic,
    wait: Callable[[float], object] = time.sleep,
) -> Callable[[], Snapshot]:
    """A source that waits for a snapshot with rates that it has not given yet, and does not ask before one is due.

    For the first one it waits `first` seconds, and takes one without rates then. After one more `interval` without a
    new one it gives the old one again: an agent that is stuck shows by the time in the title. SetupError when there is
    no snapshot at all; Stopped when `wait` returns true.
    """
    shown: Snapshot | None = None

    def next_snapshot() -> Snapshot:
        nonlocal shown
        begun = now()
        give_up = begun + (first if shown is None else interval)
        if shown is not None and (early := (shown.at_ns + shown.interval_ns) / NS_PER_SECOND - begun) > 0:
            _wait(min(early, interval))
        while True:
            snapshot = latest()
            if snapshot is not None and snapshot.interval_ns > 0 and (shown is None or snapshot.at_ns != shown.at_ns):
                break
            if now() >= give_up:
                break
            _wait(POLL_SECONDS)
        if snapshot is None:
            raise SetupError("the agent has stopped giving snapshots: see its log, or start gputop again")
        shown = snapshot
        return snapshot

    def _wait(seconds: float) -> None:
        if wait(seconds):
            raise Stopped

    return next_snapshot
