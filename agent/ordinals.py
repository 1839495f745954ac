# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which GPU a process means by device 0, 1, …: its own numbering against NVML's.

Pure. Source: CUDA C programming guide, environment variables CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from agent.model import Device, DeviceUuid

VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def visible_devices(
    environment: Mapping[str, str], devices: Sequence[Device], exposed: Collection[int] | None = None
) -> tuple[DeviceUuid, ...]:
    """The process's devices in its order; empty when that cannot be told from outside.

    `exposed` are the minor numbers of /dev/nvidiaN that the process sees, None for all of them: in a container
    numbering begins with the first that it was given. Without CUDA_DEVICE_ORDER=PCI_BUS_ID the driver sorts by speed, which is
    NVML's order as long as all are equal. An entry that names no device ends the list, as it does for CUDA. Of MIG
    instances a process can use only one, and by default which one is the driver's choice.
    """
    split = {device.parent for device in devices if device.parent is not None}
    usable = sorted((d for d in devices if d.uuid not in split and _is_exposed(d, devices, exposed)), key=_order)
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is not None and not any(word.strip().isdigit() for word in wanted.split(",")):
        return _list(wanted, usable)
    mixed = len({device.name for device in usable}) > 1
    if split or (mixed and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"):
        return (usable[0].uuid,) if len(usable) == 1 else ()
    return tuple(device.uuid for device in usable) if wanted is None else _list(wanted, usable)


def _order(device: Device) -> tuple[str, int]:
    return device.pci_bus_id, device.index


def _is_exposed(device: Device, devices: Sequence[Device], exposed: Collection[int] | None) -> bool:
    if exposed is None:
        return True
    if device.parent is not None:
        device = next((one for one in devices if one.uuid == device.parent), device)
    return device.minor is None or device.minor in exposed


def _list(wanted: str, usable: Sequence[Device]) -> tuple[DeviceUuid, ...]:
    found: list[DeviceUuid] = []
    for word in (part.strip() for part in wanted.split(",")):
        device = _named(word, usable)
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
    """The device of an ordinal; where that is not known, the only one that the process can or does use, else None."""
    if ordinal is not None and ordinal < len(visible):
        return visible[ordinal]
    if len(visible) == 1 and ordinal is None:
        return visible[0]
    return in_use[0] if len(in_use) == 1 else None
