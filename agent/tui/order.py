# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which entries are shown, in which order: sorted by a column, filtered by a word, the tree laid out in lines. Pure.

Figures begin with the largest and names with A, unless reversed; what is unknown is last either way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent.model import Enforcement
from agent.tui.entries import Entry
from agent.tui.throttle import slack, stopped

FIGURES: Final = {
    "sm": "sm_ratio",
    "memory": "memory_bytes",
    "tx": "pcie_tx_bytes_per_second",
    "rx": "pcie_rx_bytes_per_second",
    "launches": "launches_per_second",
}


@dataclass(frozen=True, slots=True)
class Order:
    """The column that a list is sorted by."""

    column: str = "sm"
    reverse: bool = False


BUSIEST: Final = Order()


@dataclass(frozen=True, slots=True)
class Line:
    """The n-th line of an entry. `stem` is what the tree draws before its name."""

    entry: Entry
    part: int
    stem: tuple[bool, ...] = ()  # from the outside in: whether it is the last one at that level

    @property
    def key(self) -> tuple[object, ...]:
        """The same line at the next tick."""
        return (self.entry.key, self.part)


def arranged(entries: Sequence[Entry], order: Order, wanted: str = "") -> list[Line]:
    """The lines of a list, of what matches `wanted` only."""
    return list(_lines(_matching(entries, wanted.casefold()), order, ()))


def found(lines: Sequence[Line], wanted: str, after: int) -> int | None:
    """The next line that matches, from `after` on and then from the top."""
    word = wanted.casefold()
    circle = [*range(after, len(lines)), *range(min(after, len(lines)))]
    hits = (index for index in circle if lines[index].part == 0 and _matches(lines[index].entry, word))
    return next(hits, None)


def worth(entry: Entry, column: str) -> float | str | None:
    """What an entry is sorted by; None is unknown."""
    if column in FIGURES:
        return _sum(getattr(usage, FIGURES[column], None) for usage in entry.usage)
    if column == "tgid":
        return int(entry.names["tgid"]) if "tgid" in entry.names else None
    if column == "gpu":
        return entry.index
    if column in entry.names:
        return entry.names[column].casefold()
    return None if entry.said is None else _said(entry.said, column)


def _said(said: Enforcement, column: str) -> float | str | None:
    known: dict[str, float | str | None] = {
        "role": said.role,
        "latency": said.latency_seconds,
        "slack": slack(said),
        "share": said.share_ratio,
        "state": stopped(said),
        "reason": said.reason,
    }
    return known.get(column)


def _sum(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


def _lines(entries: Iterable[Entry], order: Order, stem: tuple[bool, ...]) -> Iterator[Line]:
    ordered = _sorted(entries, order)
    for entry in ordered:
        here = (*stem, entry is ordered[-1])
        yield from (Line(entry, part, here) for part in range(max(1, len(entry.usage))))
        yield from _lines(entry.children, order, here)


def _sorted(entries: Iterable[Entry], order: Order) -> list[Entry]:
    everything = list(entries)
    moving = [entry for entry in everything if not entry.stays]
    moving.sort(key=lambda entry: (entry.names.get("name", ""), entry.key))
    values = {entry.key: worth(entry, order.column) for entry in moving}
    known = [entry for entry in moving if values[entry.key] is not None]
    figures = [value for value in values.values() if not isinstance(value, str) and value is not None]
    known.sort(key=lambda entry: values[entry.key], reverse=bool(figures) != order.reverse)  # type: ignore[arg-type,return-value]
    unknown = [entry for entry in moving if values[entry.key] is None]
    return known + unknown + [entry for entry in everything if entry.stays]


def _matching(entries: Iterable[Entry], word: str) -> list[Entry]:
    """Those that match, with all below them, and those above one that matches."""
    return [kept for entry in entries if (kept := _kept(entry, word)) is not None]


def _kept(entry: Entry, word: str) -> Entry | None:
    if not word or (_matches(entry, word) and not entry.stays):
        return entry
    below = _matching(entry.children, word)
    return replace(entry, children=tuple(below)) if below or entry.stays else None


def _matches(entry: Entry, word: str) -> bool:
    said = entry.said
    words = [*entry.names.values(), *([said.role, said.rule or ""] if said else [])]
    return any(word in text.casefold() for text in words)
