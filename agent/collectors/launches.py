# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Launches per process, device and function, out of the map `launches`.

While that is full, launches are counted in `other_launches`, under function 0: detail is lost, no launch is.
"""

from __future__ import annotations

from collections.abc import Iterable

from agent.layout import DEVICE_UNKNOWN, LaunchKey
from agent.libbpf import Map
from agent.model import ProcessId
from agent.probes import Probes
from agent.samples import LaunchCount


class Launches:
    """Reads both maps whole; remembers the keys so that a dead process can be taken out of them."""

    name = "launches"

    def __init__(self, probes: Probes) -> None:
        self._maps = (probes.map("launches"), probes.map("other_launches"))
        self._keys: dict[ProcessId, list[tuple[Map, LaunchKey]]] = {}

    def collect(self, now_ns: int) -> Iterable[LaunchCount]:
        """One sample per (process, device, function)."""
        self._keys = {}
        for counts in self._maps:
            for key, value in counts.items():
                process = key.process.id()
                self._keys.setdefault(process, []).append((counts, key))
                ordinal = None if key.device == DEVICE_UNKNOWN else key.device
                yield LaunchCount(process, ordinal, key.function, value.launches, value.blocks, value.threads_per_block)

    def forget(self, process: ProcessId) -> None:
        """Deletes the process's entries."""
        for counts, key in self._keys.pop(process, ()):
            counts.delete(key)
