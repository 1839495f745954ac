# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What of a snapshot the list shows, and how: devices, namespace, view, tree, order, filter, columns. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rich.text import Text

from agent.core.errors import SetupError
from agent.core.model import ContainerUsage, DeviceUuid, ProcessUsage, Snapshot
from agent.core.text import Glyphs, label
from agent.tui import columns as rows
from agent.tui.columns import Column, fit, header, line
from agent.tui.listing import BUSIEST, Line, Order, View, arranged, entries

T = TypeVar("T")
U = TypeVar("U", ContainerUsage, ProcessUsage)


def narrowed(snapshot: Snapshot, only: Collection[str] = (), namespace: str | None = None) -> Snapshot:
    """`only`: 0 (a GPU with its MIG instances), 0:1 (one of these), or beginnings of UUIDs.

    What is unattributed stays that of the whole device.
    """
    if only:
        snapshot = _devices(snapshot, {uuid for word in only for uuid in _meant(snapshot, word)})
    return snapshot if namespace is None else _namespace(snapshot, namespace)


def _meant(snapshot: Snapshot, word: str) -> list[DeviceUuid]:
    devices = [reading.device for reading in snapshot.devices]
    found = [
        one.uuid
        for one in devices
        if word in (str(one.index), label(one)) or (len(word) > 3 and one.uuid.startswith(word))
    ]
    if not found:
        there = ", ".join(label(one) for one in devices) or "none"
        raise SetupError(f"--only {word}: there is no such GPU; by index there are: {there}")
    return found


def _devices(snapshot: Snapshot, wanted: Collection[DeviceUuid]) -> Snapshot:
    containers = (
        replace(used, functions=tuple(one for one in used.functions if one.device in wanted))
        for used in _used(snapshot.containers, wanted)
    )
    return replace(
        snapshot,
        devices=tuple(reading for reading in snapshot.devices if reading.device.uuid in wanted),
        containers=tuple(containers),
        processes=tuple(_used(snapshot.processes, wanted)),
        unattributed=tuple(rest for rest in snapshot.unattributed if rest.device in wanted),
        ended=tuple(_used(snapshot.ended, wanted)),
        held=tuple(_used(snapshot.held, wanted)),
        health=_of(snapshot.health, wanted),
        device_totals=_of(snapshot.device_totals, wanted),
    )


def _used(owners: Iterable[U], wanted: Collection[DeviceUuid]) -> Iterable[U]:
    """Those that used one of the devices, with nothing of the others."""
    for owner in owners:
        if usage := tuple(one for one in owner.usage if one.device in wanted):
            yield replace(owner, usage=usage)


def _of(by_device: Mapping[DeviceUuid, T], wanted: Collection[DeviceUuid]) -> dict[DeviceUuid, T]:
    return {uuid: value for uuid, value in by_device.items() if uuid in wanted}


def _namespace(snapshot: Snapshot, namespace: str) -> Snapshot:
    def mine(used: Iterable[ContainerUsage]) -> tuple[ContainerUsage, ...]:
        return tuple(one for one in used if one.container.namespace == namespace)

    containers = mine(snapshot.containers)
    keys = {used.container.key for used in containers}
    return replace(
        snapshot,
        containers=containers,
        processes=tuple(used for used in snapshot.processes if used.process.container in keys),
        enforcement={key: status for key, status in snapshot.enforcement.items() if key in keys},
        ended=mine(snapshot.ended),
        held=mine(snapshot.held),
    )


@dataclass(frozen=True, slots=True)
class ListOptions:
    """How the list is shown; each key of the keyboard makes a new one. `hidden` are keys of columns."""

    view: View = View.CONTAINER
    tree: bool = False
    order: Order = BUSIEST
    wanted: str = ""
    hidden: frozenset[str] = frozenset()

    def of_view(self, view: View) -> ListOptions:
        """Another view, in the order that it shares with this one or else in the usual one."""
        shared = view is not View.PROCESS and self.view is not View.PROCESS
        return replace(self, view=view, order=self.order if shared else BUSIEST)

    def branched(self) -> ListOptions:
        """With the tree, or without it; a tree begins with containers."""
        if self.view is View.PROCESS:
            return replace(self.of_view(View.CONTAINER), tree=True)
        return replace(self, tree=not self.tree)

    def sorted_beside(self, step: int, shown: Sequence[Column]) -> ListOptions:
        """By the next column to the right (1) or to the left (-1) of those that are shown."""
        keys = [column.key for column in shown]
        at = keys.index(self.order.column) if self.order.column in keys else 0
        return replace(self, order=Order(keys[(at + step) % len(keys)]))

    def reversed(self) -> ListOptions:
        """The other way round."""
        return replace(self, order=replace(self.order, reverse=not self.order.reverse))


@dataclass(frozen=True, slots=True)
class ListTable:
    """The list of a snapshot, laid out for one width."""

    snapshot: Snapshot
    options: ListOptions
    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    glyphs: Glyphs

    @classmethod
    def of(cls, snapshot: Snapshot, options: ListOptions, width: int, glyphs: Glyphs) -> ListTable:
        """Sorted, filtered and fit to the width."""
        columns = [one for one in rows.columns(snapshot, options.view) if one.key not in options.hidden]
        lines = arranged(entries(snapshot, options.view, tree=options.tree), options.order, options.wanted)
        return cls(snapshot, options, tuple(fit(columns, width)), tuple(lines), glyphs)

    @property
    def header(self) -> Text:
        """The titles of the columns."""
        return header(self.columns, self.glyphs, self.options.order.column, self.options.order.reverse)

    def drawn(self, index: int) -> Text:
        """The n-th line; only those that are on the screen are drawn."""
        cells = rows.row(self.lines[index], self.snapshot, self.options.view, self.glyphs)
        return line(self.columns, cells, self.glyphs)
