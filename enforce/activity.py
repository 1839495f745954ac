# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much of each device the online containers keep busy, learned from snapshots; what is left over is the offline
work's thread percentage under MPS (MuxFlow, arXiv 2303.13803: offline % ≈ 100 − the online job's SM activity).

Pure but for its memory. The high quantile of the last minutes is taken, not the mean: too much left to the online
side costs throughput for a while, too little costs its promise for as long as the offline client lives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from agent.clock import NS_PER_SECOND
from agent.model import ContainerKey, DeviceUuid, Snapshot
from enforce.policy.model import Role
from enforce.roster import Seat

WINDOW_NS = 600 * NS_PER_SECOND
QUANTILE = 0.95
LEAST_SAMPLES = 10
_MOST_SAMPLES = 3600  # with a short --interval


class OnlineActivity:
    """The online containers' SM activity per device, over the last minutes."""

    def __init__(self) -> None:
        self._seen: dict[DeviceUuid, deque[tuple[int, float]]] = {}
        self._last_ns: int | None = None

    def observe(self, seats: Mapping[ContainerKey, Seat], snapshot: Snapshot) -> None:
        """Takes in a snapshot, once. Nothing is learned of a device while an online activity there is unknown."""
        if snapshot.at_ns == self._last_ns:
            return
        self._last_ns = snapshot.at_ns
        online = {key for key, seat in seats.items() if seat.classification.role is Role.ONLINE}
        sums: dict[DeviceUuid, float | None] = {}
        for row in snapshot.containers:
            for usage in row.usage if row.container.key in online else ():
                so_far = sums.get(usage.device, 0.0)
                sums[usage.device] = None if so_far is None or usage.sm_ratio is None else so_far + usage.sm_ratio
        for device, total in sums.items():
            if total is not None:
                self._seen.setdefault(device, deque(maxlen=_MOST_SAMPLES)).append((snapshot.at_ns, min(1.0, total)))
        self._forget(snapshot)

    def left_over_percent(self, device: DeviceUuid) -> int | None:
        """Whole percents, rounded down; None while too little is known."""
        samples = sorted(ratio for _, ratio in self._seen.get(device, ()))
        if len(samples) < LEAST_SAMPLES:
            return None
        busy = samples[min(len(samples) - 1, math.ceil(QUANTILE * len(samples)) - 1)]
        return max(0, 100 - math.ceil(busy * 100 - 1e-9))

    def _forget(self, snapshot: Snapshot) -> None:
        for samples in self._seen.values():
            while samples and samples[0][0] < snapshot.at_ns - WINDOW_NS:
                samples.popleft()
        present = {reading.device.uuid for reading in snapshot.devices}
        self._seen = {device: samples for device, samples in self._seen.items() if samples and device in present}
