# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The health of all devices of this node: owns each one's state from look to look.

A MIG instance is no better than its GPU. A device that left the snapshot is forgotten; a lost one stays in it. There is
one for the agent's life: another policy begins with what is known of the devices, or their old XIDs would be new ones.
"""

from __future__ import annotations

from agent.clock import NS_PER_SECOND
from agent.model import DeviceHealth, DeviceReading, DeviceUuid, Snapshot
from enforce.health import HealthState, HealthView, step, view, worst
from enforce.policy.model import Policy


class SysMonitor:
    """One state machine per device."""

    def __init__(self) -> None:
        self._states: dict[DeviceUuid, HealthState] = {}

    def look(self, snapshot: Snapshot, policy: Policy) -> dict[DeviceUuid, HealthView]:
        """Takes in what the snapshot says; cheap, and the same snapshot may be looked at again.

        Time is the snapshot's: however long it is the latest one, it is one look at the devices.
        """
        self._states = {
            reading.device.uuid: step(
                self._states.get(reading.device.uuid, HealthState()),
                reading,
                policy.health_of(reading.device),
                snapshot.at_ns,
            )
            for reading in snapshot.devices
        }
        return {reading.device.uuid: self._view(reading) for reading in snapshot.devices}

    def _view(self, reading: DeviceReading) -> HealthView:
        own = view(self._states[reading.device.uuid])
        parent = self._states.get(reading.device.parent) if reading.device.parent else None
        return (worst([own, view(parent)]) or own) if parent else own


def published(views: dict[DeviceUuid, HealthView], now_ns: int) -> dict[DeviceUuid, DeviceHealth]:
    """For the snapshot, the metrics and gputop."""
    return {
        uuid: DeviceHealth(
            state=one.state.value,
            reason=one.reason,
            seconds=max(0, now_ns - one.since_ns) / NS_PER_SECOND,
            hold_seconds=max(0, one.hold_until_ns - now_ns) / NS_PER_SECOND,
        )
        for uuid, one in views.items()
    }
