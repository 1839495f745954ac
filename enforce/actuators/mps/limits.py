# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which limits an offline container's later clients are to have, and what each has to become again afterwards.

A limit that is as strict already is left as it is, and so is one that could not be put back. The thread percentage is
what the online containers leave over of each device, learned from snapshots (MuxFlow, arXiv 2303.13803: offline % ≈
100 − the online job's SM activity). Of the last minutes the high quantile is taken, not the mean: too much left to the
online side costs throughput for a while, too little costs its SLO for as long as the offline client lives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, DeviceUuid, Snapshot
from enforce.actuators.mps.model import MpsControl, MpsSetting, Scope
from enforce.actuators.mps.restore import LimitChange
from enforce.actuators.mps.survey import MpsEndpoint, Workloads
from enforce.model import Subject
from enforce.policy.model import OfflineRule, Role
from enforce.workloads import Workload, processes_of

WINDOW_NS = 600 * NS_PER_SECOND
QUANTILE = 0.95
MIN_SAMPLES = 10
_MAX_SAMPLES = 3600  # with a short --interval


class OnlineActivity:
    """The online containers' SM activity per device, over the last minutes."""

    def __init__(self) -> None:
        self._seen: dict[DeviceUuid, deque[tuple[int, float]]] = {}
        self._last_ns: int | None = None

    def observe(self, workloads: Mapping[ContainerKey, Workload], snapshot: Snapshot) -> None:
        """Takes in a snapshot, once. Nothing is learned of a device while an online activity there is unknown."""
        if snapshot.at_ns == self._last_ns:
            return
        self._last_ns = snapshot.at_ns
        online = {key for key, workload in workloads.items() if workload.classification.role is Role.ONLINE}
        sums: dict[DeviceUuid, float | None] = {}
        for row in snapshot.containers:
            for usage in row.usage if row.container.key in online else ():
                so_far = sums.get(usage.device, 0.0)
                sums[usage.device] = None if so_far is None or usage.sm_ratio is None else so_far + usage.sm_ratio
        for device, total in sums.items():
            if total is not None:
                self._seen.setdefault(device, deque(maxlen=_MAX_SAMPLES)).append((snapshot.at_ns, min(1.0, total)))
        self._forget(snapshot)

    def left_over_percent(self, device: DeviceUuid) -> int | None:
        """Whole percents, rounded down; None while too little is known."""
        samples = sorted(ratio for _, ratio in self._seen.get(device, ()))
        if len(samples) < MIN_SAMPLES:
            return None
        busy = samples[min(len(samples) - 1, math.ceil(QUANTILE * len(samples)) - 1)]
        return max(0, 100 - math.ceil(busy * 100 - 1e-9))

    def _forget(self, snapshot: Snapshot) -> None:
        for samples in self._seen.values():
            while samples and samples[0][0] < snapshot.at_ns - WINDOW_NS:
                samples.popleft()
        present = {reading.device.uuid for reading in snapshot.devices}
        self._seen = {device: samples for device, samples in self._seen.items() if samples and device in present}


_MIB, _GIB = 1 << 20, 1 << 30
MIN_PERCENT = 5  # a client must make progress
Sizes = Mapping[DeviceUuid, int]


def changes(  # six parameters: two of the daemon, two of the container, two of what is wanted and there is
    endpoint: MpsEndpoint,
    control: MpsControl,
    scope: Scope,
    subject: Subject,
    wanted: Mapping[str, str | None],
    sizes: Sizes,
) -> Iterator[LimitChange]:
    """The limits to change; asks the daemon what is set. `wanted`: kind of limit → value; `sizes`: device → bytes."""
    ordinals = {uuid: ordinal for uuid, ordinal in _ordinals(endpoint, sizes) if uuid in subject.devices}
    device_bytes = {ordinals[uuid]: size for uuid, size in sizes.items() if uuid in ordinals}
    for what, settings in control.settings(scope, tuple(ordinals.values())).items():
        value = wanted.get(what)
        for setting in settings if value is not None else ():
            before = control.get(setting)
            back = before or _unlimited(setting, device_bytes)
            if value is not None and back and _size(setting, before) > _size(setting, value):
                yield LimitChange(setting, before, value, back)


def _ordinals(endpoint: MpsEndpoint, sizes: Sizes) -> Iterable[tuple[DeviceUuid, int]]:
    """To 555 no daemon gives them; where there is one device, it is number 0. Else no limit of memory can be set."""
    return endpoint.ordinals or [(uuid, 0) for uuid in sizes if len(sizes) == 1]


def percent(subject: Subject, activity: OnlineActivity) -> str | None:
    """What the online side leaves on the device where it leaves least; never less than the rule's floor."""
    found = [activity.left_over_percent(device) for device in subject.devices]
    known = [left for left in found if left is not None]
    floor = max(MIN_PERCENT, math.ceil(subject.rule.limits.floor_ratio * 100))
    return str(min(100, max(floor, min(known)))) if known else None


def quota(scope: Scope, endpoint: MpsEndpoint, workloads: Workloads) -> str | None:
    """The largest quota of the offline containers that it reaches; None when one of them has none."""
    reached = {process for process, scopes in endpoint.reached if scope in scopes}
    quotas = [
        workload.classification.rule.limits.memory_bytes
        for workload in workloads.values()
        if isinstance(workload.classification.rule, OfflineRule) and reached & set(processes_of(workload))
    ]
    sizes = [bytes_ for bytes_ in quotas if bytes_ is not None]
    return f"{max(sizes) // _MIB}M" if sizes and len(sizes) == len(quotas) else None


def _unlimited(setting: MpsSetting, device_bytes: Mapping[int, int]) -> str:
    """The value that means no limit: of memory all that the device has, in whole GiB; "" where there is none."""
    if setting.what != "memory":
        return ""
    largest = max(device_bytes.values(), default=None)
    bytes_ = largest if setting.device is None else device_bytes.get(setting.device)
    return f"{-(-bytes_ // _GIB) * 1024}M" if bytes_ else ""


def _size(setting: MpsSetting, value: str) -> float:
    """For comparing: less is stricter."""
    if setting.what == "priority":
        return -float(value)
    return float(value.rstrip("M")) if value else math.inf
