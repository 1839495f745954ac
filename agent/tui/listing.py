# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a list has lines about: containers, processes, kernels, devices, and what is unattributed; as a tree.

Every view ends each device with what is unattributed, so that a column adds up to the device's figure in the head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from agent.model import (
    ContainerKey,
    ContainerUsage,
    DeviceUuid,
    Enforcement,
    FunctionUsage,
    ProcessUsage,
    Provenance,
    Snapshot,
    Unattributed,
    Usage,
)
from agent.names import joined
from agent.tui.cells import label

UNATTRIBUTED = "(unattributed)"


class View(StrEnum):
    """What a row is."""

    CONTAINER = "container"
    PROCESS = "process"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Entry:
    """One of them, with a line per device that it used. `key` is the same at the next tick."""

    key: tuple[str, ...]
    names: Mapping[str, str]  # by column; not yet fit to be shown
    usage: tuple[Usage | Unattributed, ...] = ()
    said: Enforcement | None = None
    container: ContainerKey | None = None
    children: tuple[Entry, ...] = ()
    index: int | None = None  # of the first device in the snapshot
    style: str = ""
    stays: bool = False  # after the others, however those are sorted, and whatever is filtered


def entries(snapshot: Snapshot, view: View, *, tree: bool = False) -> list[Entry]:
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


def _container(used: ContainerUsage, snapshot: Snapshot, indices: Mapping[DeviceUuid, int]) -> Entry:
    container = used.container
    where = joined(container.runtime, container.namespace, container.pod)
    names = {"name": container.name, "where": where, "image": container.image or ""}
    said = snapshot.enforcement.get(container.key)
    return Entry(("container", container.key), names, used.usage, said, container.key, (), _first(used.usage, indices))


def _members(snapshot: Snapshot) -> defaultdict[ContainerKey, list[ProcessUsage]]:
    members: defaultdict[ContainerKey, list[ProcessUsage]] = defaultdict(list)
    for used in snapshot.processes:
        members[used.process.container].append(used)
    return members


def _inside(
    used: ContainerUsage, members: Sequence[ProcessUsage], indices: Mapping[DeviceUuid, int]
) -> tuple[Entry, ...]:
    """Processes, and the kernels below their process where there is only one, else beside the processes."""
    kernels = tuple(_kernel(function, used.container.key) for function in used.functions)
    processes = [_process(one, f"{one.process.id.tgid} {one.process.command}", indices) for one in members]
    if len(processes) == 1:
        return (replace(processes[0], children=kernels),)
    return (*processes, *kernels)


def _process(used: ProcessUsage, name: str, indices: Mapping[DeviceUuid, int]) -> Entry:
    process = used.process
    key = ("process", f"{process.id.tgid}.{process.id.start_ticks}")
    names = {"name": name, "tgid": str(process.id.tgid), "user": process.user, "command": process.command}
    return Entry(key, names, used.usage, None, process.container, (), _first(used.usage, indices))


def _kernel(function: FunctionUsage, container: ContainerKey) -> Entry:
    rate = function.launches_per_second
    usage = Usage(function.device, function.sm_ratio, Provenance.ESTIMATED, None, None, None, rate)
    name = function.name or ("(graph without a name)" if function.is_graph else "(kernel without a name)")
    key = ("kernel", container, function.device, name)
    return Entry(key, {"name": name}, (usage,), container=container, style="dim")


def _processes(snapshot: Snapshot) -> list[Entry]:
    indices = _indices(snapshot)
    called = {used.container.key: used.container.name for used in snapshot.containers}
    found = [
        _process(used, called.get(used.process.container, used.process.container), indices)
        for used in snapshot.processes
    ]
    rest = [_rest(rest) for rest in snapshot.unattributed]
    return found + [replace(entry, names={"command": UNATTRIBUTED}) for entry in rest]


def _devices(snapshot: Snapshot, containers: Sequence[Entry]) -> list[Entry]:
    found = []
    for reading in snapshot.devices:
        uuid = reading.device.uuid
        here = [_only(entry, uuid) for entry in containers if any(usage.device == uuid for usage in entry.usage)]
        here += [_rest(rest) for rest in snapshot.unattributed if rest.device == uuid]
        names = {"name": f"GPU {label(reading.device)} {reading.device.name}", "where": uuid}
        found.append(Entry(("gpu", uuid), names, children=tuple(here), style="bold", stays=True))
    return found


def _only(entry: Entry, uuid: DeviceUuid) -> Entry:
    """As much of it as is on this device."""
    below = (_only(child, uuid) for child in entry.children)
    usage = tuple(usage for usage in entry.usage if usage.device == uuid)
    return replace(entry, key=(*entry.key, uuid), usage=usage, children=tuple(child for child in below if child.usage))


def _rest(rest: Unattributed) -> Entry:
    return Entry(("rest", rest.device), {"name": UNATTRIBUTED}, (rest,), style="italic dim", stays=True)
