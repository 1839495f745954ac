# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which containers work on a device without launches that the probes see: by NVML's share of time, and by launches.

A driver library that is linked into the program, a private copy, Vulkan or a direct ioctl make work that no probe
counts, so no launch budget can hold it. Each launch that was counted explains some GPU time: what its function's waits
say, and a little more where they are short or missing, for durations are estimates. A container is `unprobed` where
for some seconds most of what one of its processes did is explained by no launch. One launch that keeps the device busy
for seconds looks the same while it was not yet waited for, and no launch budget can hold that either.

Invariants: pure; unknown until NVML has said that the container works; idleness is no evidence, so the verdict stays
until work is seen that launches explain. What is kept is bounded by the processes that NVML lists.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerKey, DeviceUuid, ProcessId

GRACE_NS: Final = 5 * NS_PER_SECOND // 2  # of ticks with work: three at one a second
MEMORY_NS: Final = 12 * NS_PER_SECOND  # how old a tick may be that still counts
LEAST_BUSY: Final = 0.02  # of a tick; NVML's figures are whole percents
UNSEEN_PART: Final = 0.75  # of what a process did
ENTER_PART, LEAVE_PART = 0.75, 0.4  # of the ticks with work
WAITED_FACTOR: Final = 1.5  # durations by waits are good to about so much
LEAST_PER_KERNEL_NS: Final = 2_000_000
UNWAITED_NS: Final = NS_PER_SECOND  # what a launch may take that nothing is known of
MOST_ASSUMED_NS: Final = 2 * NS_PER_SECOND  # that launches without a known duration explain in advance
MOST_WAITED_NS: Final = 60 * NS_PER_SECOND  # more than any queue holds


@dataclass(frozen=True, slots=True)
class Launched:
    """Launches of one function by one process in a tick, and how long one takes by its waits; None: unknown."""

    launches: int
    kernels: int
    waited_ns: float | None


@dataclass(frozen=True, slots=True)
class ProcessTick:
    """What one process did on one device in a tick. `busy_ns`: by NVML; None: it said nothing of the process."""

    process: ProcessId
    container: ContainerKey
    device: DeviceUuid
    busy_ns: float | None
    launched: Collection[Launched] = ()


@dataclass(slots=True)
class _Credit:
    """GPU time of one process that its launches explain and NVML has not reported yet, ns."""

    waited_ns: float = 0.0
    assumed_ns: float = 0.0

    def add(self, launched: Launched) -> None:
        if launched.waited_ns is None:
            self.assumed_ns += launched.launches * UNWAITED_NS
        else:
            self.waited_ns += WAITED_FACTOR * launched.launches * launched.waited_ns
            self.assumed_ns += max(launched.kernels, launched.launches) * LEAST_PER_KERNEL_NS
        self.waited_ns = min(self.waited_ns, MOST_WAITED_NS)
        self.assumed_ns = min(self.assumed_ns, MOST_ASSUMED_NS)

    def take(self, busy_ns: float) -> float:
        """What of the time is not explained."""
        waited = min(self.waited_ns, busy_ns)
        assumed = min(self.assumed_ns, busy_ns - waited)
        self.waited_ns -= waited
        self.assumed_ns -= assumed
        return busy_ns - waited - assumed


@dataclass(slots=True)
class _History:
    """The last ticks in which a container worked on a device: (when, length, whether unseen), and the verdict."""

    ticks: deque[tuple[int, int, bool]] = field(default_factory=deque)
    unprobed: bool | None = None

    def observe(self, now_ns: int, interval_ns: int, unseen: bool) -> None:
        self.ticks.append((now_ns, interval_ns, unseen))
        while self.ticks and self.ticks[0][0] < now_ns - MEMORY_NS:
            self.ticks.popleft()
        recent_ns, unseen_ns = 0, 0
        for _, length_ns, was_unseen in reversed(self.ticks):
            recent_ns += length_ns
            unseen_ns += length_ns if was_unseen else 0
            if recent_ns >= GRACE_NS:
                break
        else:
            return
        if unseen_ns >= ENTER_PART * recent_ns:
            self.unprobed = True
        elif unseen_ns <= LEAVE_PART * recent_ns:
            self.unprobed = False


@dataclass(slots=True)
class UnprobedWork:
    """See the module. For the observing thread."""

    _credits: dict[tuple[ProcessId, DeviceUuid], _Credit] = field(default_factory=dict)
    _histories: dict[ContainerKey, dict[DeviceUuid, _History]] = field(default_factory=dict)
    _now_ns: int = 0  # the sum of all ticks
    unseen: frozenset[ProcessId] = frozenset()  # whose work no launch explained in the last tick

    def observe(self, ticks: Iterable[ProcessTick], interval_ns: int) -> None:
        """Once a tick. A process that NVML cannot tell apart from others (an MPS client) must not be among them."""
        worked: dict[tuple[ContainerKey, DeviceUuid], bool] = {}
        self._now_ns += interval_ns
        unexplained = set[ProcessId]()
        for tick in ticks:
            credit = self._credits.setdefault((tick.process, tick.device), _Credit())
            for launched in tick.launched:
                credit.add(launched)
            if tick.busy_ns is None or tick.busy_ns < LEAST_BUSY * interval_ns:
                continue
            unseen = credit.take(tick.busy_ns) > UNSEEN_PART * tick.busy_ns
            unexplained.update({tick.process} if unseen else ())
            place = (tick.container, tick.device)
            worked[place] = worked.get(place, False) or unseen
        self.unseen = frozenset(unexplained)
        for (container, device), unseen in worked.items() if interval_ns else ():
            history = self._histories.setdefault(container, {}).setdefault(device, _History())
            history.observe(self._now_ns, interval_ns, unseen)

    def of(self, container: ContainerKey) -> Mapping[DeviceUuid, bool]:
        """By device, whether it works there unseen; a device for which that is unknown is left out."""
        histories = self._histories.get(container, {})
        return {device: one.unprobed for device, one in histories.items() if one.unprobed is not None}

    def forget(self, processes: Collection[ProcessId]) -> None:
        """Drops processes that are gone."""
        gone = set(processes)
        self._credits = {owner: credit for owner, credit in self._credits.items() if owner[0] not in gone}

    def retain(self, containers: Set[ContainerKey]) -> None:
        """Drops all other containers: those without a process on a GPU."""
        self._histories = {key: histories for key, histories in self._histories.items() if key in containers}
