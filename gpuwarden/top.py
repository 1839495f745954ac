# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gputop`: asks the running agent and, where none answers, observes by itself. Live, once, or from a recording.

A recording holds everything; --only and --namespace narrow what is shown of it, or of what is watched.
"""

from __future__ import annotations

import argparse
import math
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import SetupError, UsageError
from agent.core.model import ContainerKey, Snapshot
from agent.exporters.api.client import HELP, fetch, place
from agent.tui import plain
from agent.tui.history import AskDecisions
from agent.tui.listing import View
from agent.tui.plain import FIRST_SECONDS, Latest, fresh
from agent.tui.recording import Source, opened, played, recorded
from agent.tui.view import narrowed
from gpuwarden.options import LIBCUDA_HELP, add_return_probes

if TYPE_CHECKING:
    from enforce.audit.text import Block


def run(
    options: argparse.Namespace, latest: Latest, ask_decisions: AskDecisions | None = None, *, alone: bool = False
) -> int:
    """gputop with parsed options, watching `latest`: the newest snapshot, None while there is none.

    `ask_decisions` asks the agent about a container. `alone`: no agent runs.
    """
    ending = threading.Event()
    with ExitStack() as stack:
        is_plain = plain.is_plain(options)
        first = FIRST_SECONDS + (options.interval if is_plain else 0.0)  # what is printed cannot be mended later
        source = fresh(latest, options.interval, first, wait=ending.wait)
        if options.record:
            source = stack.enter_context(recorded(source, options.record))
        shown = _narrowed(source, options)
        if is_plain:
            return plain.show(options, shown, alone=alone)
        from agent.tui.live import run as live  # textual is slow to import

        return live.watch(options, shown, ask_decisions, ending, alone=alone)


def replay(options: argparse.Namespace) -> int:
    """gputop with parsed options, playing --replay back at --interval."""
    if options.record:
        raise UsageError("--record and --replay: give one of them; a recording is copied as any file is")
    with opened(options.replay) as recording:
        if plain.is_plain(options):
            return plain.show(options, _narrowed(played(recording), options), alone=False)
        from agent.tui.live import run as live

        return live.replay(options, recording)


def _narrowed(source: Source, options: argparse.Namespace) -> Source:
    def next_snapshot() -> Snapshot:
        return narrowed(source(), options.only, options.namespace)

    return next_snapshot


INTERVAL_SECONDS: Final = 1.0
SHORTEST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """gputop's options."""
    add = parser.add_argument
    add("--libcuda", action="append", default=[], metavar="FILE", help=LIBCUDA_HELP)
    add("--socket", type=Path, help=HELP)
    add_return_probes(parser)
    views = parser.add_mutually_exclusive_group()
    for view in View:
        text = f"one row per {view}" + (" (default)" if view is View.CONTAINER else "")
        views.add_argument(f"--by-{view}", dest="view", action="store_const", const=view, help=text)
    parser.set_defaults(view=View.CONTAINER)
    add("-1", "--once", action="store_true", help="print one tick and exit")
    add("--json", action="store_true", help="print one JSON object per tick; see docs/snapshot.md")
    add("--interval", type=_seconds, default=INTERVAL_SECONDS, metavar="S", help="seconds between ticks (%(default)s)")
    add(
        "-o",
        "--only",
        nargs="+",
        default=[],
        metavar="GPU",
        help="only these devices, by index (a MIG instance: 0:1) or beginning of UUID",
    )
    add("--namespace", metavar="NAME", help="only containers of this Kubernetes namespace")
    add(
        "--light",
        action="store_true",
        help="colours for a light background, which COLORFGBG in the environment can also select",
    )
    add("--no-color", action="store_true", help="no colours; NO_COLOR in the environment does the same")
    add("--record", type=Path, metavar="FILE", help="also append each tick to FILE, one JSON object a line")
    add("--replay", type=Path, metavar="FILE", help="play FILE back instead of observing: arrows, Home and End seek")


def act(options: argparse.Namespace) -> int:
    """Exit code of the view. SetupError: no agent answers, and nothing can be observed without one."""
    if options.replay:
        return replay(options)
    socket = options.socket or place()
    if fetch(socket) is not None:
        return run(options, lambda: fetch(socket), partial(_decisions, socket))
    from agent.observer import Observer, ObserverSettings

    interval_ns = int(options.interval * NS_PER_SECOND)
    settings = ObserverSettings(interval_ns, tuple(options.libcuda), return_probes=options.return_probes)
    with ExitStack() as stack:
        try:
            observer = stack.enter_context(Observer(settings))
        except SetupError as error:
            raise SetupError(f"no agent answers at {socket}, and without one: {error}") from error
        return run(options, observer.snapshot, alone=True)


def _decisions(socket: Path, key: ContainerKey) -> Sequence[Block]:
    """The running agent's last decisions about a container."""
    from gpuwarden.explain import latest

    return latest(socket, key)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not SHORTEST_SECONDS <= value <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no interval: give seconds between 0.1 and 3600")
    return value
