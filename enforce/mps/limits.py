# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which limits an offline container's later clients are to have, and what each has to become again afterwards.

A limit that is as strict already is left as it is, and so is one that could not be put back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from agent.model import DeviceUuid
from enforce.activity import OnlineActivity
from enforce.model import Subject
from enforce.mps.model import Control, Scope, Setting
from enforce.mps.restoring import Change
from enforce.mps.standing import Seats
from enforce.mps.survey import Place
from enforce.policy.model import OfflineRule
from enforce.roster import processes_of

_MIB = 1 << 20
LEAST_PERCENT = 5  # a client must be able to go on
Sizes = Mapping[DeviceUuid, int]


def changes(
    place: Place, control: Control, scope: Scope, subject: Subject, wanted: Mapping[str, str | None], sizes: Sizes
) -> Iterator[Change]:
    """Asks the daemon what is set now. `wanted`: kind of limit → value; `sizes`: device → its memory."""
    ordinals = {uuid: ordinal for uuid, ordinal in place.ordinals if uuid in subject.devices}
    there = {ordinals[uuid]: size for uuid, size in sizes.items() if uuid in ordinals}
    for what, settings in control.settings(scope, tuple(ordinals.values())).items():
        value = wanted.get(what)
        for setting in settings if value is not None else ():
            before = control.get(setting)
            back = before or _whole(setting, there)
            if value is not None and back and _size(setting, before) > _size(setting, value):
                yield Change(setting, before, value, back)


def percent(subject: Subject, activity: OnlineActivity) -> str | None:
    """What the online side leaves on the device where it leaves least; never less than the rule's floor."""
    found = [activity.left_over_percent(device) for device in subject.devices]
    known = [left for left in found if left is not None]
    floor = max(LEAST_PERCENT, math.ceil(subject.rule.limits.floor_ratio * 100))
    return str(min(100, max(floor, min(known)))) if known else None


def quota(scope: Scope, place: Place, seats: Seats) -> str | None:
    """The largest quota of the offline containers that it reaches; None when one of them has none."""
    reached = {process for process, scopes in place.reached if scope in scopes}
    quotas = [
        seat.classification.rule.limits.memory_bytes
        for seat in seats.values()
        if isinstance(seat.classification.rule, OfflineRule) and reached & set(processes_of(seat))
    ]
    sizes = [bytes_ for bytes_ in quotas if bytes_ is not None]
    return f"{max(sizes) // _MIB}M" if sizes and len(sizes) == len(quotas) else None


def _whole(setting: Setting, there: Mapping[int, int]) -> str:
    """What stands for no limit: of memory all that the device has; "" where there is nothing such."""
    if setting.what != "memory":
        return ""
    bytes_ = there.get(setting.device) if setting.device is not None else max(there.values(), default=None)
    return f"{-(-bytes_ // _MIB)}M" if bytes_ else ""


def _size(setting: Setting, value: str) -> float:
    """For comparing: less is stricter."""
    if setting.what == "priority":
        return -float(value)
    return float(value.rstrip("M")) if value else math.inf
