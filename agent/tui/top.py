# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gputop: where its snapshots come from, and which of its faces shows them.

A recording holds everything; --only and --namespace narrow what is shown of it, or of what is watched.
"""

from __future__ import annotations

import argparse
import threading
from contextlib import ExitStack

from agent.errors import UsageError
from agent.model import Snapshot
from agent.tui import plain
from agent.tui.fresh import FIRST_SECONDS, Latest, fresh
from agent.tui.narrowing import narrowed
from agent.tui.recording import Source, opened, played, recorded
from agent.tui.told import Tell


def run(options: argparse.Namespace, latest: Latest, tell: Tell | None = None, *, alone: bool = False) -> int:
    """gputop with parsed options, watching `latest`: the newest snapshot, None while there is none.

    `tell` knows the decisions about a container. `alone`: no agent runs.
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
        from agent.tui import live  # textual is slow to import

        return live.watch(options, shown, tell, ending, alone=alone)


def replay(options: argparse.Namespace) -> int:
    """gputop with parsed options, playing --replay back at --interval."""
    if options.record:
        raise UsageError("--record and --replay: give one of them; a recording is copied as any file is")
    with opened(options.replay) as recording:
        if plain.is_plain(options):
            return plain.show(options, _narrowed(played(recording), options), alone=False)
        from agent.tui import live

        return live.replay(options, recording)


def _narrowed(source: Source, options: argparse.Namespace) -> Source:
    def next_snapshot() -> Snapshot:
        return narrowed(source(), options.only, options.namespace)

    return next_snapshot
