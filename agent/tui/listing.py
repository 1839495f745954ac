# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The entries of gputop's list (containers, processes, kernels, devices) as a tree, sorted, filtered, in lines. Pure.

Every view ends each device with what is unattributed, so that a column adds up to the device's figure in the head.
Figures begin with the largest and names with A, unless reversed; what is unknown is last either way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from agent.core.model import (
    ContainerKey,
    ContainerUsage,
    DeviceUuid,
    EnforcementStatus,
    FunctionUsage,
    ProcessUsage,
    Provenance,
    Snapshot,
    Unattributed,
    Usage,
)
from agent.core.text import joined, label, stopped

UNATTRIBUTED = "(unattributed)"


class View(StrEnum):
    """What a row is."""

    CONTAINER = "container"
    PROCESS = "process"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class ListEntry:
    """One of them, with a line per device that it used. `key` is the same at the next tick."""

    key: tuple[str, ...]
    names: Mapping[str, str]  # by column; not yet fit to be shown
    usage: tuple[Usage | Unattributed, ...] = ()
    status: EnforcementStatus | None = None
    container: ContainerKey | None = None
    children: tuple[ListEntry, ...] = ()
    index: int | None = None  # of the first device in the snapshot
    style: str = ""
    unprobed: frozenset[DeviceUuid] = frozenset()  # devices on which it works without launches that are seen
    stays: bool = False  # after the others, however those are sorted, and whatever is filtered


def entries(snapshot: Snapshot, view: View, *, tree: bool = False) -> list[ListEntry]:
    """All of a view, unsorted. `tree`: containers with their processes and kernels, where containers are listed."""
    if view is View.PROCESS:
        return _processes(snapshot)
    indices = _indices(snapshot)
    found = [_container(used, snapshot, indices) for used in snapshot.containers]
    if tree:
        members = _members(snapshot)
        found = [
            replace(entry, children=_inside(used, members[used.container.key], indices))
            for entry, used in zip(found, snapshot.containers, strict=True)
        ]
    if view is View.CONTAINER:
        return found + [_rest(rest) for rest in snapshot.unattributed]
    return _devices(snapshot, found)


def _indices(snapshot: Snapshot) -> dict[DeviceUuid, int]:
    """A MIG instance comes right behind its GPU, whose number it shares."""
    return {reading.device.uuid: index for index, reading in enumerate(snapshot.devices)}


def _first(usage: Sequence[Usage], indices: Mapping[DeviceUuid, int]) -> int | None:
    return min((indices[one.device] for one in usage if one.device in indices), default=None)


def _container(used: ContainerUsage, snapshot: Snapshot, indices: Mapping[DeviceUuid, int]) -> ListEntry:
    container = used.container
    where = joined(container.runtime, container.namespace, container.pod)
    names = {"name": container.name, "where": where, "image": container.image or ""}
    status = snapshot.enforcement.get(container.key)
    unprobed = frozenset(device for device, works_unseen in used.unprobed.items() if works_unseen)
    return ListEntry(
        ("container", container.key),
        names,
        used.usage,
        status,
        container.key,
        index=_first(used.usage, indices),
        unprobed=unprobed,
    )


def _members(snapshot: Snapshot) -> defaultdict[ContainerKey, list[ProcessUsage]]:
    members: defaultdict[ContainerKey, list[ProcessUsage]] = defaultdict(list)
    for used in snapshot.processes:
        members[used.process.container].append(used)
    return members


def _inside(
    used: ContainerUsage, members: Sequence[ProcessUsage], indices: Mapping[DeviceUuid, int]
) -> tuple[ListEntry, ...]:
    """Processes, and the kernels below their process where there is only one, else beside the processes."""
    kernels = tuple(_kernel(function, used.container.key) for function in used.functions)
    processes = [_process(one, f"{one.process.id.tgid} {one.process.command}", indices) for one in members]
    if len(processes) == 1:
        return (replace(processes[0], children=kernels),)
    return (*processes, *kernels)


def _process(used: ProcessUsage, name: str, indices: Mapping[DeviceUuid, int]) -> ListEntry:
    process = used.process
    key = ("process", f"{process.id.tgid}.{process.id.start_ticks}")
    names = {"name": name, "tgid": str(process.id.tgid), "user": process.user, "command": process.command}
    return ListEntry(key, names, used.usage, None, process.container, (), _first(used.usage, indices))


def _kernel(function: FunctionUsage, container: ContainerKey) -> ListEntry:
    rate = function.launches_per_second
    usage = Usage(function.device, function.sm_ratio, Provenance.ESTIMATED, None, None, None, rate)
    name = function.name or ("(graph without a name)" if function.is_graph else "(kernel without a name)")
    key = ("kernel", container, function.device, name)
    return ListEntry(key, {"name": name}, (usage,), container=container, style="dim")


def _processes(snapshot: Snapshot) -> list[ListEntry]:
    indices = _indices(snapshot)
    called = {used.container.key: used.container.name for used in snapshot.containers}
    found = [
        _process(used, called.get(used.process.container, used.process.container), indices)
        for used in snapshot.processes
    ]
    rest = [_rest(rest) for rest in snapshot.unattributed]
    return found + [replace(entry, names={"command": UNATTRIBUTED}) for entry in rest]


def _devices(snapshot: Snapshot, containers: Sequence[ListEntry]) -> list[ListEntry]:
    found = []
    for reading in snapshot.devices:
        uuid = reading.device.uuid
        here = [_only(entry, uuid) for entry in containers if any(usage.device == uuid for usage in entry.usage)]
        here += [_rest(rest) for rest in snapshot.unattributed if rest.device == uuid]
        names = {"name": f"GPU {label(reading.device)} {reading.device.name}", "where": uuid}
        found.append(ListEntry(("gpu", uuid), names, children=tuple(here), style="bold", stays=True))
    return found


def _only(entry: ListEntry, uuid: DeviceUuid) -> ListEntry:
    """As much of it as is on this device."""
    below = (_only(child, uuid) for child in entry.children)
    usage = tuple(usage for usage in entry.usage if usage.device == uuid)
    return replace(entry, key=(*entry.key, uuid), usage=usage, children=tuple(child for child in below if child.usage))


def _rest(rest: Unattributed) -> ListEntry:
    return ListEntry(("rest", rest.device), {"name": UNATTRIBUTED}, (rest,), style="italic dim", stays=True)


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

    entry: ListEntry
    part: int
    stem: tuple[bool, ...] = ()  # from the outside in: whether it is the last one at that level

    @property
    def key(self) -> tuple[object, ...]:
        """The same line at the next tick."""
        return (self.entry.key, self.part)


def arranged(entries: Sequence[ListEntry], order: Order, wanted: str = "") -> list[Line]:
    """The lines of a list, of what matches `wanted` only."""
    return list(_lines(_matching(entries, wanted.casefold()), order, ()))


def found(lines: Sequence[Line], wanted: str, after: int) -> int | None:
    """The next line that matches, from `after` on and then from the top."""
    word = wanted.casefold()
    circle = [*range(after, len(lines)), *range(min(after, len(lines)))]
    hits = (index for index in circle if lines[index].part == 0 and _matches(lines[index].entry, word))
    return next(hits, None)


def worth(entry: ListEntry, column: str) -> float | str | None:
    """What an entry is sorted by; None is unknown."""
    if column in FIGURES:
        return _sum(getattr(usage, FIGURES[column], None) for usage in entry.usage)
    if column == "tgid":
        return int(entry.names["tgid"]) if "tgid" in entry.names else None
    if column == "gpu":
        return entry.index
    if column in entry.names:
        return entry.names[column].casefold()
    return None if entry.status is None else _status(entry.status, column)


def _status(status: EnforcementStatus, column: str) -> float | str | None:
    known: dict[str, float | str | None] = {
        "role": status.role,
        "latency": status.latency_seconds,
        "slack": status.slack_ratio,
        "share": status.share_ratio,
        "state": stopped(status),
        "reason": status.reason,
    }
    return known.get(column)


def _sum(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


def _lines(entries: Iterable[ListEntry], order: Order, stem: tuple[bool, ...]) -> Iterator[Line]:
    ordered = _sorted(entries, order)
    for entry in ordered:
        here = (*stem, entry is ordered[-1])
        yield from (Line(entry, part, here) for part in range(max(1, len(entry.usage))))
        yield from _lines(entry.children, order, here)


def _sorted(entries: Iterable[ListEntry], order: Order) -> list[ListEntry]:
    everything = list(entries)
    moving = [entry for entry in everything if not entry.stays]
    moving.sort(key=lambda entry: (entry.names.get("name", ""), entry.key))
    values = {entry.key: worth(entry, order.column) for entry in moving}
    known = [entry for entry in moving if values[entry.key] is not None]
    figures = [value for value in values.values() if not isinstance(value, str) and value is not None]
    known.sort(key=lambda entry: values[entry.key], reverse=bool(figures) != order.reverse)  # type: ignore[arg-type,return-value]
    unknown = [entry for entry in moving if values[entry.key] is None]
    return known + unknown + [entry for entry in everything if entry.stays]


def _matching(entries: Iterable[ListEntry], word: str) -> list[ListEntry]:
    """Those that match, with all below them, and those above one that matches."""
    return [kept for entry in entries if (kept := _kept(entry, word)) is not None]


def _kept(entry: ListEntry, word: str) -> ListEntry | None:
    if not word or (_matches(entry, word) and not entry.stays):
        return entry
    below = _matching(entry.children, word)
    return replace(entry, children=tuple(below)) if below or entry.stays else None


def _matches(entry: ListEntry, word: str) -> bool:
    status = entry.status
    words = [*entry.names.values(), *([status.role, status.rule or ""] if status else [])]
    return any(word in text.casefold() for text in words)
