# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Bytes copied per process, device and direction, out of the map `copies`."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent.layout import COPY_DIRECTIONS, DEVICE_UNKNOWN, CopyKey
from agent.model import ProcessId
from agent.probes import Probes
from agent.samples import CopyCount, Probed


class Copies:
    """Reads the whole map; it has at most five entries per process and device."""

    name = "copies"

    def __init__(self, probes: Probes) -> None:
        self._map = probes.map("copies")
        self._keys: dict[ProcessId, list[CopyKey]] = {}

    def collect(self, now_ns: int) -> Iterable[Probed | CopyCount]:
        """One sample per (process, device, direction)."""
        self._keys = {}
        for key, value in self._map.items():
            process = key.process.id()
            self._keys.setdefault(process, []).append(key)
            ordinal = None if key.device == DEVICE_UNKNOWN else key.device
            yield Probed(process)
            yield CopyCount(process, ordinal, COPY_DIRECTIONS[key.direction], value.bytes, value.calls)

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Deletes their entries."""
        for process in processes:
            for key in self._keys.pop(process, ()):
                self._map.delete(key)
