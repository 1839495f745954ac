# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The live view on a real terminal.

Invariant: the terminal is as it was afterwards, whatever ended it (a key, SIGINT, SIGTERM, SIGHUP, an error); an error
at the start, and whatever is logged, never lands in the middle of the screen.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from agent.core.text import ASCII, UTF8
from agent.tui import cells
from agent.tui.history import AskDecisions
from agent.tui.live.app import Setting, Top
from agent.tui.live.feed import Failed, Feed, LiveFeed, ReplayFeed
from agent.tui.recording import Recording, Source
from agent.tui.view import narrowed

ENDING = {signal.SIGINT: 0, signal.SIGTERM: 128 + signal.SIGTERM, signal.SIGHUP: 128 + signal.SIGHUP}


def watch(
    options: argparse.Namespace,
    source: Source,
    ask_decisions: AskDecisions | None,
    ending: threading.Event,
    *,
    alone: bool,
) -> int:
    """Shows what the source gives. The exit status."""
    feed = LiveFeed(source(), source, options.interval, ending)
    try:
        return _run(_setting(options, ask_decisions, alone=alone), feed)
    finally:
        feed.stop()


def replay(options: argparse.Namespace, recording: Recording) -> int:
    """Plays a recording. The exit status."""
    narrow = partial(narrowed, only=options.only, namespace=options.namespace)
    narrow(recording[0])  # a file that is something else, or lacks the GPU, is reported before the screen is taken
    return _run(_setting(options, None, replaying=True), ReplayFeed(recording, narrow, options.interval))


def _setting(
    options: argparse.Namespace, ask_decisions: AskDecisions | None, *, alone: bool = False, replaying: bool = False
) -> Setting:
    if options.no_color:
        os.environ["NO_COLOR"] = "1"  # where textual looks
    if os.environ.get("NO_COLOR") == "":
        del os.environ["NO_COLOR"]  # which means nothing when it is empty, but textual does not know
    utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
    light = options.light or cells.is_light(os.environ)
    return Setting(options.view, UTF8 if utf8 else ASCII, light, replaying, alone, ask_decisions)


def _run(setting: Setting, feed: Feed) -> int:
    top = Top(setting, feed)
    with _logged_to(top):
        asyncio.run(_until_ended(top))
    return top.return_code or 0


async def _until_ended(top: Top) -> None:
    loop = asyncio.get_running_loop()
    for number, code in ENDING.items():
        loop.add_signal_handler(number, partial(top.exit, return_code=code))
    await top.run_async()


class _FootHandler(logging.Handler):
    """Shows log records at the foot, with their time."""

    def __init__(self, top: Top) -> None:
        super().__init__(logging.ERROR)
        self._top = top

    def emit(self, record: logging.LogRecord) -> None:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._top.post_message(Failed(f"{at} {record.name}: {record.getMessage()}", stays=True))


@contextmanager
def _logged_to(top: Top) -> Iterator[None]:
    root, foot = logging.getLogger(), _FootHandler(top)
    before = list(root.handlers)
    for handler in before:
        root.removeHandler(handler)
    root.addHandler(foot)
    try:
        yield
    finally:
        root.removeHandler(foot)
        for handler in before:
            root.addHandler(handler)
