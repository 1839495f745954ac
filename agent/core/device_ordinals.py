# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The GPU that a process addresses as device 0, 1, …: CUDA's numbering in the process mapped to NVML's UUIDs.

Pure. Source: CUDA C programming guide, environment variables CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from agent.core.model import Device, DeviceUuid

_BUS_ID = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{1,2}):([0-9a-f]{1,2})(?:\.[0-7])?", re.IGNORECASE)
_MOST_DIGITS = 9
VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
Ordinals = tuple[DeviceUuid | None, ...]
"""A process's devices by its ordinals; None: not known."""


def visible_devices(
    environment: Mapping[str, str], devices: Sequence[Device], exposed: Collection[int] | None = None
) -> tuple[DeviceUuid, ...]:
    """The process's devices in its order; empty when that cannot be known from outside.

    `exposed` are the minor numbers of /dev/nvidiaN that the process sees, None for all of them: in a container
    numbering begins with the first exposed one. Without CUDA_DEVICE_ORDER=PCI_BUS_ID the driver puts the fastest
    first, which is NVML's order as long as all are equal. An entry that names no device ends the list, as it does for
    CUDA. Of MIG instances a process has just one, and which one is the driver's choice unless it is named.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    instances = [device for device in devices if device.parent is not None]
    named = next((one.uuid for one in instances if wanted and wanted.split(",")[0].strip() == one.uuid), None)
    if named is not None:
        return (named,)
    gpus = sorted((d for d in devices if d.parent is None and _is_exposed(d, exposed)), key=_order)
    by_number = wanted is None or any(_number(word.strip()) is not None for word in wanted.split(","))
    if by_number and len({gpu.name for gpu in gpus}) > 1 and environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        return ()
    found = [gpu.uuid for gpu in gpus] if wanted is None else _list(wanted, gpus)
    split = {device.parent for device in instances}
    return () if split.intersection(found) else tuple(found)


def _order(device: Device) -> tuple[str, int]:
    return device.pci_bus_id, device.index


def _is_exposed(device: Device, exposed: Collection[int] | None) -> bool:
    return exposed is None or device.minor is None or device.minor in exposed


def _list(wanted: str, gpus: Sequence[Device]) -> list[DeviceUuid]:
    found: list[DeviceUuid] = []
    for word in (part.strip() for part in wanted.split(",")):
        device = _named(word, gpus)
        if device is None:
            break
        found.append(device)
    return found


def _named(word: str, gpus: Sequence[Device]) -> DeviceUuid | None:
    number = _number(word)
    if number is not None:
        return gpus[number].uuid if number < len(gpus) else None
    if not word.startswith("GPU-"):
        return None
    matches = [gpu.uuid for gpu in gpus if gpu.uuid.startswith(word)]
    return matches[0] if len(matches) == 1 else None


def bus_place(text: str) -> tuple[int, int, int] | None:
    """Domain, bus and device of "[domain:]bus:device[.function]", as programs and NVML write it; None: no such form."""
    found = _BUS_ID.fullmatch(text)
    return None if found is None else (int(found[1] or "0", 16), int(found[2], 16), int(found[3], 16))


def _number(word: str) -> int | None:
    """The ordinal in a word of the variable, whose content is untrusted: isdecimal() alone accepts other scripts."""
    return int(word) if word.isascii() and word.isdecimal() and len(word) <= _MOST_DIGITS else None


def device_of(ordinal: int | None, visible: Ordinals, in_use: Sequence[DeviceUuid]) -> DeviceUuid | None:
    """The device of an ordinal; if that is unknown, the only device that the process sees or uses, else None."""
    if ordinal is not None and ordinal < len(visible) and visible[ordinal] is not None:
        return visible[ordinal]
    if len(visible) == 1 and ordinal is None:
        return visible[0]
    return in_use[0] if len(in_use) == 1 else None
