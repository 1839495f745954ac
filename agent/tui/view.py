# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Only some devices, only one namespace: a snapshot with the rest left out. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from agent.errors import SetupError
from agent.model import ContainerUsage, DeviceUuid, ProcessUsage, Snapshot
from agent.tui.cells import label

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
        enforcement={key: said for key, said in snapshot.enforcement.items() if key in keys},
        ended=mine(snapshot.ended),
        held=mine(snapshot.held),
    )
