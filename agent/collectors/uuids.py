# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which device each ordinal of a process is, as the driver told the process itself.

It was asked for its UUID (cuDeviceGetUuid) or for what is at a place on the PCI bus (cuDeviceGetByPCIBusId).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from agent.model import ProcessId
from agent.probes import Probes
from agent.samples import OrdinalBusId, OrdinalUuid


class Uuids:
    """Reads the maps `uuids` and `bus_ids`, which drop the oldest by themselves."""

    name = "uuids"

    def __init__(self, probes: Probes) -> None:
        self._uuids = probes.map("uuids")
        self._bus_ids = probes.map("bus_ids")

    def collect(self, now_ns: int) -> Iterable[OrdinalUuid | OrdinalBusId]:
        """All that is known."""
        for key, value in self._uuids.items():
            yield OrdinalUuid(key.process.id(), key.ordinal, bytes(value.bytes))
        for key, value in self._bus_ids.items():
            yield OrdinalBusId(key.process.id(), key.ordinal, value.text.decode(errors="replace"))

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Keeps nothing."""
