# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Launches per process, device and function, out of the map `launches`."""

from __future__ import annotations

from collections.abc import Iterable

from agent.layout import DEVICE_UNKNOWN, LaunchKey
from agent.model import ProcessId
from agent.probes import Probes
from agent.samples import LaunchCount


class Launches:
    """Reads the whole map; remembers the keys so that a dead process can be taken out of it."""

    name = "launches"

    def __init__(self, probes: Probes) -> None:
        self._map = probes.map("launches")
        self._keys: dict[ProcessId, list[LaunchKey]] = {}

    def collect(self, now_ns: int) -> Iterable[LaunchCount]:
        """One sample per (process, device, function)."""
        self._keys = {}
        for key, value in self._map.items():
            process = key.process.id()
            self._keys.setdefault(process, []).append(key)
            ordinal = None if key.device == DEVICE_UNKNOWN else key.device
            yield LaunchCount(process, ordinal, key.function, value.launches, value.blocks, value.threads_per_block)

    def forget(self, process: ProcessId) -> None:
        """Deletes the process's entries."""
        for key in self._keys.pop(process, ()):
            self._map.delete(key)
