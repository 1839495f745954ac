# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gputop's loop: take a snapshot, show it, wait; once or until told to stop.

Invariant: the terminal is as it was afterwards, whatever ended the loop (Ctrl-C, SIGTERM, a closed pipe, an error).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.live import Live

from agent import schema
from agent.model import Snapshot
from agent.tui.fresh import Latest, fresh
from agent.tui.recording import EndOfRecording, Source, recorded, replayed
from agent.tui.screen import View, render

INTERVAL_SECONDS: Final = 1.0
SHORTEST_SECONDS: Final = 0.1
PLAIN_WIDTH: Final = 160  # into a pipe or a file: everything, since nothing there wraps
ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_INTERVAL_HELP: Final = "seconds between ticks (%(default)s)"
RESIZE_SECONDS: Final = 0.25  # how soon a resized terminal is redrawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """gputop's options."""
    views = parser.add_mutually_exclusive_group()
    for view in View:
        text = f"one row per {view}" + (" (default)" if view is View.CONTAINER else "")
        views.add_argument(f"--by-{view}", dest="view", action="store_const", const=view, help=text)
    parser.set_defaults(view=View.CONTAINER)
    parser.add_argument("-1", "--once", action="store_true", help="show one tick and end")
    parser.add_argument("--json", action="store_true", help="one JSON object per tick (docs: agent.schema)")
    parser.add_argument("--interval", type=_seconds, default=INTERVAL_SECONDS, metavar="S", help=_INTERVAL_HELP)
    parser.add_argument("--no-color", action="store_true", help="no colours; NO_COLOR in the environment does the same")
    parser.add_argument("--record", type=Path, metavar="F", help="also append each tick to F, one JSON object a line")
    parser.add_argument("--replay", type=Path, metavar="F", help="play F back instead of watching")


def run(options: argparse.Namespace, latest: Latest) -> int:
    """gputop with parsed options, watching `latest`: the newest snapshot, None while there is none."""
    source = fresh(latest, options.interval)
    if not options.record:
        return _run(options, source)
    with recorded(source, options.record) as recording:
        return _run(options, recording)


def replay(options: argparse.Namespace) -> int:
    """gputop with parsed options, playing --replay back at --interval."""
    with replayed(options.replay) as source:
        return _run(options, source)


def _run(options: argparse.Namespace, source: Source) -> int:
    return run_top(
        source,
        once=options.once,
        json=options.json,
        interval=options.interval,
        view=options.view,
        no_color=options.no_color,
    )


def run_top(
    source: Source,
    *,
    once: bool = False,
    json: bool = False,
    interval: float = INTERVAL_SECONDS,
    view: View = View.CONTAINER,
    no_color: bool = False,
    console: Console | None = None,
) -> int:
    """Show what the source gives until it ends or the user does. The exit status."""
    console = console or _console(no_color)
    try:
        with _ended_by_signals(), contextlib.suppress(KeyboardInterrupt, EndOfRecording):
            if json:
                _each(source, once, interval, lambda snapshot: _print_json(console, snapshot))
            elif once or not console.is_terminal or console.is_dumb_terminal:
                _each(source, once, interval, lambda snapshot: console.print(render(snapshot, view)))
            else:
                _live(source, interval, view, console)
    except BrokenPipeError:  # the reader has seen enough, as "head" does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at exit
    return 0


def _each(source: Source, once: bool, interval: float, show: Callable[[Snapshot], None]) -> None:
    for _ in _ticks(interval, time.sleep):
        show(source())
        if once:
            return


def _live(source: Source, interval: float, view: View, console: Console) -> None:
    first = source()  # before the screen is taken over: an error at the start stays readable
    live = Live(render(first, view, full=True), console=console, screen=True, auto_refresh=False)
    try:  # not "with": a signal that comes while it is being entered would leave the screen taken
        live.start(refresh=True)
        ticks = _ticks(interval, lambda seconds: _redrawing(live, seconds))
        next(ticks)
        for _ in ticks:
            live.update(render(source(), view, full=True), refresh=True)
    finally:
        live.stop()


def _redrawing(live: Live, seconds: float) -> None:
    """Wait, and redraw at once when the terminal changes its size."""
    until = time.monotonic() + seconds
    drawn = live.console.size
    while (left := until - time.monotonic()) > 0:
        time.sleep(min(left, RESIZE_SECONDS))
        if live.console.size != drawn:
            drawn = live.console.size
            live.refresh()


def _ticks(interval: float, wait: Callable[[float], None]) -> Iterator[None]:
    """Now, and then every `interval` seconds; ticks that were missed are not made up for."""
    due = time.monotonic()
    while True:
        yield
        due = max(due + interval, time.monotonic())
        wait(due - time.monotonic())


def _print_json(console: Console, snapshot: Snapshot) -> None:
    console.file.write(schema.dumps(snapshot) + "\n")
    console.file.flush()


class _PipeConsole(Console):
    """rich ends the program with status 1 when the reader of a pipe leaves; that is no failure of ours."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(no_color: bool) -> Console:
    plain = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return _PipeConsole(
        no_color=no_color or None, highlight=False, soft_wrap=False, width=PLAIN_WIDTH if plain else None
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


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not SHORTEST_SECONDS <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no interval: give seconds, at least {SHORTEST_SECONDS}")
    return value
