# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which GPU a process means by device 0, 1, …: its own numbering against NVML's.

Pure. Source: CUDA C programming guide, environment variables CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agent.model import Device, DeviceUuid


def visible_devices(environment: Mapping[str, str], devices: Sequence[Device]) -> tuple[DeviceUuid, ...]:
    """The process's devices in its order. An entry that names no device ends the list, as it does for CUDA.

    Without CUDA_DEVICE_ORDER=PCI_BUS_ID the driver sorts by speed; for equal GPUs that is NVML's order.
    """
    ordered = sorted(devices, key=lambda device: device.index)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return tuple(device.uuid for device in ordered)
    found: list[DeviceUuid] = []
    for word in (part.strip() for part in wanted.split(",")):
        device = _named(word, ordered)
        if device is None:
            break
        found.append(device)
    return tuple(found)


def _named(word: str, ordered: Sequence[Device]) -> DeviceUuid | None:
    if word.isdigit():
        return ordered[int(word)].uuid if int(word) < len(ordered) else None
    if not word.startswith(("GPU-", "MIG-")):
        return None
    matches = [device.uuid for device in ordered if device.uuid.startswith(word)]
    return matches[0] if len(matches) == 1 else None


def device_of(ordinal: int | None, visible: Sequence[DeviceUuid], in_use: Sequence[DeviceUuid]) -> DeviceUuid | None:
    """The device of an ordinal; without one, the only device that the process can or does use, else None."""
    if ordinal is not None:
        return visible[ordinal] if ordinal < len(visible) else None
    if len(visible) == 1:
        return visible[0]
    return in_use[0] if len(in_use) == 1 else None
