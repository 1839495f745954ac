# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden explain CONTAINER`: asks the running agent, or reads its decision log, and says it in words or JSON."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import IO, TypeVar

from agent import doors, endpoint
from agent.clock import wall_ns
from agent.errors import SetupError, UsageError, WardenError
from agent.schema import decode, encode
from enforce.explain import logfile
from enforce.explain.choice import choose
from enforce.explain.history import History
from enforce.explain.model import VERSION, Explanation, Interval, Kept, Story
from enforce.explain.text import Block, blocks, heading
from enforce.explain.track import KEPT_NS, thinned

WORD = "explain"
MOST_BLOCKS = 12
_AGO = re.compile(r"(\d{1,5})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
S = TypeVar("S", Interval, Kept)


def explain(options: argparse.Namespace, out: IO[str]) -> int:
    """Chooses, cuts and shows. WardenError when there is nobody to ask or nothing of that name."""
    ago_ns = _ago_ns(options.since)
    if options.decisions is not None:
        now = wall_ns()
        history, bad = logfile.read(options.decisions, now)
        key = choose(options.container, history.explain().containers).key
        found = history.explain(key)
        if bad:
            found = replace(found, forgotten={**found.forgotten, "lines that cannot be read": bad})
    else:
        found = _asked(doors.place(options.run_dir), options.container)
    assert found.story is not None
    since = max(found.wall_ns - ago_ns, found.since_wall_ns or 0)
    story = _cut(found.story, since)
    if options.json:
        json.dump(encode(replace(found, containers=(), story=story)), out, indent=2)
        out.write("\n")
    else:
        show(found, story, since, out)
    return 0


def answer(history: History, key: str) -> str:
    """What the agent's socket says to "explain" and "explain KEY": one line of JSON."""
    return json.dumps(encode(history.explain(key or None)), separators=(",", ":"), allow_nan=False)


def _asked(socket: Path, wanted: str) -> Explanation:
    everybody = _ask(socket, "")
    if not everybody.has_policy:
        raise WardenError("the agent has no policy, so it slows nobody: start it with --policy FILE")
    found = _ask(socket, choose(wanted, everybody.containers).key)
    if found.story is None:
        raise WardenError(f"{wanted} has just gone: ask again")
    return found


def latest(socket: Path, key: str) -> list[Block]:
    """The last stretches of one container, the latest first, for gputop. None without a policy."""
    found = _ask(socket, key)
    if found.story is None:
        return []
    told = replace(found.story, intervals=found.story.intervals[-MOST_BLOCKS:], kept=found.story.kept[-MOST_BLOCKS:])
    return blocks(told, None)[::-1]


def _ask(socket: Path, key: str) -> Explanation:
    line = endpoint.ask(socket, WORD, key)
    if line is None:
        raise SetupError(f"no agent answers at {socket}: start one, or give its decision log with --decisions FILE")
    try:
        document = json.loads(line)
    except ValueError as error:
        raise SetupError(f"the agent at {socket} does not answer in JSON ({error}): see its log") from error
    if not isinstance(document, dict) or document.get("version") != VERSION:
        raise SetupError(f"the agent at {socket} is of another version: use the same release of both")
    return decode(Explanation, document, "explanation")


def _ago_ns(text: str) -> int:
    ago = _AGO.fullmatch(text)
    seconds = int(ago[1]) * _SECONDS[ago[2]] if ago else 0
    if not 0 < seconds * 10**9 <= KEPT_NS:
        raise UsageError(f"--since {text}: write 90s, 10m or 1h; no more than an hour is remembered")
    return seconds * 10**9


def _cut(story: Story, since_ns: int) -> Story:
    """Only what reaches into the time that was asked for."""
    intervals = tuple(one for one in story.intervals if one.until_ns >= since_ns)
    return replace(story, intervals=intervals, kept=tuple(one for one in story.kept if one.until_ns >= since_ns))


def _few(stretches: tuple[S, ...], now_ns: int) -> tuple[S, ...]:
    return tuple(thinned(list(stretches), now_ns, MOST_BLOCKS))


def show(found: Explanation, story: Story, since_ns: int, out: IO[str]) -> None:
    """Prints the story in local time, its stretches merged until there are few."""
    from enforce.explain.screen import Screen  # rich is slow to import

    screen = Screen(out)
    first, *rest = heading(story, since_ns, None)
    screen.line(first, style="bold")
    for line in rest:
        screen.line(line)
    few = replace(story, intervals=_few(story.intervals, found.wall_ns), kept=_few(story.kept, found.wall_ns))
    for block in blocks(few, None):
        screen.line()
        screen.line(block.head)
        screen.pairs(block.rows)
    for what, count in found.forgotten.items():
        screen.line(f"note: {what}: {count} forgotten", style="dim")
