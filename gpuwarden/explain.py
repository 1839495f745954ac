# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden explain CONTAINER`: why it was slowed, from the running agent or its decision log, as text or JSON."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import IO, TypeVar
from urllib.parse import quote

from agent.core.clock import wall_ns
from agent.core.errors import SetupError, UsageError, WardenError
from agent.core.snapshot_json import decode, encode
from agent.exporters.api.client import EXPLAIN, ask, place
from agent.node.http_client import Response
from enforce.audit import log_reader
from enforce.audit.history import DecisionHistory
from enforce.audit.intervals import KEPT_NS, thinned
from enforce.audit.model import VERSION, ContainerHistory, Explanation, OfflineInterval, OnlineInterval, choose
from enforce.audit.text import Block, blocks, heading
from gpuwarden.options import DEFAULT_RUN_DIR

MOST_BLOCKS = 12
_AGO = re.compile(r"(\d{1,5})([smh])")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
S = TypeVar("S", OfflineInterval, OnlineInterval)


def act(options: argparse.Namespace) -> int:
    return explain(options, sys.stdout)


def explain(options: argparse.Namespace, out: IO[str]) -> int:
    """Chooses, cuts and shows. WardenError when no agent answers or nothing of that name is known."""
    ago_ns = _ago_ns(options.since)
    if options.decisions is not None:
        now = wall_ns()
        history, bad = log_reader.read(options.decisions, now)
        key = choose(options.container, history.explain().containers).key
        found = history.explain(key)
        if bad:
            found = replace(found, forgotten={**found.forgotten, "lines that cannot be read": bad})
    else:
        found = _asked(place(options.run_dir), options.container)
    assert found.story is not None
    since = max(found.wall_ns - ago_ns, found.since_wall_ns or 0)
    story = _cut(found.story, since)
    if options.json:
        json.dump(encode(replace(found, containers=(), story=story)), out, indent=2)
        out.write("\n")
    else:
        show(found, story, since, out)
    return 0


def answer(history: DecisionHistory, container: str) -> str:
    """GET /v1/explain[/CONTAINER] in the agent: a JSON document. WardenError: there is no such container."""
    found = history.explain(container or None)
    if container and found.story is None:  # not a key: a name, a pod, the beginning of an id
        found = history.explain(choose(container, found.containers).key)
    return json.dumps(encode(found), separators=(",", ":"), allow_nan=False)


def _asked(socket: Path, wanted: str) -> Explanation:
    known = _decoded(socket, _ask(socket, EXPLAIN))
    if not known.has_policy:
        raise WardenError("the agent has no policy, so it slows nothing: start it with --policy FILE")
    found = _of_key(socket, choose(wanted, known.containers).key)
    if found is None:
        raise WardenError(f"{wanted} has just gone: ask again")
    return found


def latest(socket: Path, key: str) -> list[Block]:
    """The last stretches of one container, the latest first, for gputop. None without a policy."""
    found = _of_key(socket, key)
    if found is None or found.story is None:
        return []
    story = replace(found.story, intervals=found.story.intervals[-MOST_BLOCKS:], kept=found.story.kept[-MOST_BLOCKS:])
    return blocks(story, None)[::-1]


def _of_key(socket: Path, key: str) -> Explanation | None:
    """The story of one container; None: the agent knows none of that key."""
    response = _ask(socket, f"{EXPLAIN}/{quote(key, safe='')}", (HTTPStatus.OK, HTTPStatus.NOT_FOUND))
    return None if response.status == HTTPStatus.NOT_FOUND else _decoded(socket, response)


def _ask(socket: Path, target: str, accepted: Sequence[int] = (HTTPStatus.OK,)) -> Response:
    response = ask(socket, target, accepted=accepted)
    if response is None:
        raise SetupError(f"no agent answers at {socket}: start one, or give its decision log with --decisions FILE")
    return response


def _decoded(socket: Path, response: Response) -> Explanation:
    try:
        document = json.loads(response.body)
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


def _cut(story: ContainerHistory, since_ns: int) -> ContainerHistory:
    """Only what reaches into the time that was asked for."""
    intervals = tuple(one for one in story.intervals if one.until_ns >= since_ns)
    return replace(story, intervals=intervals, kept=tuple(one for one in story.kept if one.until_ns >= since_ns))


def _few(stretches: tuple[S, ...], now_ns: int) -> tuple[S, ...]:
    return tuple(thinned(list(stretches), now_ns, MOST_BLOCKS))


def show(found: Explanation, story: ContainerHistory, since_ns: int, out: IO[str]) -> None:
    """Prints the story in local time, its stretches merged until there are few."""
    from agent.tui.terminal import Printer  # rich is slow to import

    screen = Printer(out)
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden explain`."""
    add = parser.add_argument
    add("container", metavar="CONTAINER", help="its name, pod, namespace/pod, key, or the beginning of its id")
    add("--since", default="1h", metavar="AGO", help="how far to look back: 90s, 10m, 1h at the most (%(default)s)")
    add("--json", action="store_true", help="print JSON; see docs/explain.md")
    add("--run-dir", type=Path, default=DEFAULT_RUN_DIR, help="directory of the agent's sockets (%(default)s)")
    add("--decisions", type=Path, metavar="FILE", help="read this decision log instead of asking the agent")
