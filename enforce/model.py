# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The values and interfaces of deciding and acting. Standard library only; everything is immutable."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

from agent.core.model import Container, ContainerKey, DeviceUuid, ProcessId, Snapshot
from enforce.ledger.entries import LedgerEntry
from enforce.policy.model import OfflineRule, Slo

State = TypeVar("State")


@dataclass(frozen=True, slots=True)
class Reading:
    """An online latency: the SLO's quantile over its window, and the same over the last moments.

    `recent_ns` is for quick protection; `latency_ns` is what the SLO is about. Either may have too few samples.
    A quantile of a second's requests is noisy: it is above `recent_low_ns` with 98 % certainty. `certain_ns` is what
    the quantile of a whole window comes to at least, by the recent requests alone, however fast those are that follow;
    None: nothing yet. (Without a recent part: by the window so far.)
    `also`: of the SLO's second quantile, by the same requests.
    """

    at_ns: int
    quantile: float
    latency_ns: float | None
    samples: int
    recent_ns: float | None
    recent_low_ns: float | None
    recent_samples: int
    recent_span_ns: int = 1_000_000_000  # how far back the recent part reaches
    certain_ns: float | None = None
    also: Reading | None = None

    def of(self, quantile: float) -> Reading | None:
        """The part about one of its quantiles."""
        return next((one for one in (self, self.also) if one is not None and one.quantile == quantile), None)

    @property
    def judged_ns(self) -> float | None:
        """What decisions go by: the recent latency; that of the window where too few requests are recent."""
        return self.latency_ns if self.recent_ns is None else self.recent_ns

    @property
    def of_window_ns(self) -> float | None:
        """What the SLO is about: the latency of the window; the recent one where the window has too few requests."""
        return self.recent_ns if self.latency_ns is None else self.latency_ns


def slack_ratio(reading: Reading | None, slo: Slo, *, of_window: bool = False) -> float | None:
    """How much of the target is left, by what decisions go by, or by the SLO's window; None without a reading.

    Of two quantiles that of the one with less.
    """
    if reading is None:
        return None
    latency_ns = reading.of_window_ns if of_window else reading.judged_ns
    also = slack_ratio(reading.also, slo.also, of_window=of_window) if slo.also is not None else None
    own = None if latency_ns is None else slo.slack_ratio(latency_ns)
    return min((slack for slack in (own, also) if slack is not None), default=None)


@dataclass(frozen=True, slots=True)
class Share:
    """What offline work may use: a fraction 0–1 of the device's time, and how much of it may be queued at once.

    `exhausted`: the law has nothing left to take away and the SLO is missed all the same: the ladder's next rung.
    """

    ratio: float
    max_queued_ns: int
    reason: str
    exhausted: bool = False
    soft: bool = False  # there is slack enough to queue work while an online request runs, so that no gap follows it
    blocks: int | None = None  # instead of ratio and queue: so many blocks of grids in each 50 ms
    quantile: float | None = None  # of the SLO, that bound the decision; None: the law looks at no latency


class Target(NamedTuple):
    """A process that is (to be) controlled, and the devices that it uses: ordinal → slot of the kernel's tables."""

    process: ProcessId
    container: ContainerKey
    slots: tuple[int | None, ...]  # by the process's ordinal
    slot_unknown: int | None  # for launches whose ordinal is not known


@dataclass(frozen=True, slots=True)
class CopyLevel:
    """How a process's copies between host and device are paced. Of an online process: others wait for them."""

    group: int = 0  # its container's number, from 1
    weight_thousandths: int = 1000  # of its container: its part of a link
    beside_online: bool = False  # an online process may copy on its devices: few copies may be under way


@dataclass(frozen=True, slots=True)
class Level:
    """How a process is held. The default is not at all."""

    online: bool = False  # its requests shut the gate of its devices; it is never slowed itself
    gate: bool = False  # stops at a launch while an online request runs
    soft: bool = False  # … but may queue what there is room for meanwhile
    pace: bool = False  # stops at a launch that would queue more than max_queued_ns
    share_ratio: float = 1.0
    max_queued_ns: int = 0
    launch_ns: int = 0  # estimated GPU time of one launch …
    by_blocks: bool = False  # … or what one block is charged
    max_pause_ns: int = 0
    floor_ratio: float = 0.0
    copies: CopyLevel | None = None  # None: its copies are neither paced nor waited for
    deadline_ns: int = 0  # periodic: each of its requests waits for its turn, and is to end so long after its begin

    @property
    def slows(self) -> bool:
        """Whether this can ever stop the process."""
        return self.gate or self.pace or self.deadline_ns > 0 or (self.copies is not None and not self.online)


FULL = Level()  # released


@dataclass(frozen=True, slots=True)
class OnlineOn:
    """One online container on a device: its SLO, the latest reading, and what the device's online side does."""

    container: ContainerKey
    device: DeviceUuid
    slo: Slo
    reading: Reading | None
    busy_ratio: float | None = None  # share of the time that online requests run on the device, in bursts
    blocks_total: int | None = None  # blocks that online processes launched on the device, ever

    def by_quantile(self) -> tuple[OnlineOn, ...]:
        """One for each quantile of the SLO, the highest first: what there would be without the other."""
        reading, also = self.reading, self.slo.also
        if also is None:
            return (self,)
        first = replace(reading, also=None) if reading is not None else None
        second = reading.also if reading is not None else None
        return replace(self, slo=replace(self.slo, also=None), reading=first), replace(self, slo=also, reading=second)


class Signal(Protocol):
    """Where an online latency comes from. Listed in `enforce.signals.registry.BUILTIN`."""

    name: str

    def read(self, snapshot: Snapshot, container: ContainerKey, slo: Slo, now_ns: int) -> Reading | None:
        """None: no data, never 0."""
        ...

    def trouble(self, container: ContainerKey) -> str | None:
        """Why there is no reading, as a sentence for people; None where no cause is known."""
        ...

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        ...


class Law(Protocol, Generic[State]):
    """Latency and state → share. Pure. Listed in `enforce.controller.laws.BUILTIN`."""

    name: str

    def start(self) -> State:
        """The state before the first reading."""
        ...

    def step(self, state: State, online: OnlineOn, now_ns: int) -> tuple[State, Share]:
        """One decision. `online` is the one of the device with the least slack."""
        ...


class Actuator(Protocol):
    """What makes a level real for one process. One file each."""

    name: str

    @property
    def foreign_writes(self) -> int:
        """How often another writer was found to have changed what is in force."""
        ...

    def current(self, targets: Collection[Target]) -> dict[Target, Level]:
        """What is in force now, read back; a process that this actuator does not hold is left out."""
        ...

    def apply(self, target: Target, level: Level) -> None:
        """Idempotent; `FULL` releases."""
        ...

    def disown(self, process: ProcessId) -> None:
        """What it got from the process that it was forked by ends; its own level stays."""
        ...


@dataclass(frozen=True, slots=True)
class Subject:
    """An offline container that is acted upon as a whole."""

    container: Container
    processes: tuple[ProcessId, ...]  # on a GPU, now
    devices: frozenset[DeviceUuid]
    rule: OfflineRule


class Rung(Protocol):
    """What the ladder may do to a whole offline container beyond pace and gate. One file each, in enforce.actuators.

    It is undone as `enforce.actuators.undo.UNDO[name]` says, from its ledger entries alone, by any process.
    """

    name: str

    def obstacle(self, subject: Subject) -> str | None:
        """Why it cannot be done here and now, as a sentence for people; None: it can. Must not block."""
        ...

    def intents(self, subject: Subject) -> Sequence[LedgerEntry]:
        """What has to be in the ledger before `apply`, with a place each. Empty: there is nothing to undo."""
        ...

    def apply(self, subject: Subject) -> None:
        """Idempotent. Off the deciding thread, so it may take its time. Raises WardenError or OSError."""
        ...
