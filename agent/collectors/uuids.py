# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which device each ordinal of a process is, as the driver told the process itself (cuDeviceGetUuid)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent.model import ProcessId
from agent.probes import Probes
from agent.samples import OrdinalUuid


class Uuids:
    """Reads the map `uuids`, which drops the oldest by itself."""

    name = "uuids"

    def __init__(self, probes: Probes) -> None:
        self._map = probes.map("uuids")

    def collect(self, now_ns: int) -> Iterable[OrdinalUuid]:
        """All that is known."""
        for key, value in self._map.items():
            yield OrdinalUuid(key.process.id(), key.ordinal, bytes(value.bytes))

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Keeps nothing."""
