# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The latest decisions about a container, as lines: the agent's own words, or what the last minute's snapshots show."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from agent.clock import NS_PER_SECOND
from agent.model import ContainerKey, Enforcement
from agent.tui.history import History


class Told(Protocol):
    """A stretch of time: a line, and what belongs to it, label and text each."""

    @property
    def head(self) -> str: ...

    @property
    def rows(self) -> tuple[tuple[str, str], ...]: ...


Tell = Callable[[ContainerKey], Sequence[Told]]  # the latest first; may wait for an answer; WardenError without one


@dataclass(frozen=True, slots=True)
class Seen:
    """What snapshots have shown."""

    head: str
    rows: tuple[tuple[str, str], ...] = ()


def seen(history: History, key: ContainerKey) -> list[Seen]:
    """A line for each change of reason or rungs in the last minute, the latest first."""
    return list(_seen(history, key))[::-1]


def _seen(history: History, key: ContainerKey) -> Iterator[Seen]:
    before: tuple[object, ...] | None = None
    for tick in history.ticks:
        moment = tick.containers.get(key)
        said = None if moment is None else moment.said
        if said is None or said.reason is None or (said.reason, said.rungs, said.troubles) == before:
            continue
        before = (said.reason, said.rungs, said.troubles)
        at = time.strftime("%H:%M:%S", time.localtime(tick.wall_ns // NS_PER_SECOND))
        yield Seen(f"{at}  {_share(said)}{said.reason}", _rows(said))


def _share(said: Enforcement) -> str:
    return "" if said.share_ratio is None else f"share {said.share_ratio * 100:.0f}%: "


def _rows(said: Enforcement) -> tuple[tuple[str, str], ...]:
    rungs = (("by", ", ".join(said.rungs)),) if said.rungs else ()
    return (*rungs, *(("but", f"{rung}: {why}") for rung, why in said.troubles.items()))
