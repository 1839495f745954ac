# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which slot of the kernel's tables each device has. Pure.

A device keeps its own while it is there, lost or not; what a device that left had is given to the next one, as MIG
instances come and go under new names. Beyond the last slot a device is not controlled, and is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.layout import SLOTS
from agent.model import DeviceUuid


def assign(before: Mapping[DeviceUuid, int], present: Sequence[DeviceUuid]) -> dict[DeviceUuid, int]:
    """Device → slot, for as many as there are slots."""
    kept = {device: before[device] for device in present if device in before}
    free = iter(sorted(set(range(SLOTS)) - set(kept.values())))
    return kept | dict(zip((device for device in present if device not in kept), free, strict=False))
