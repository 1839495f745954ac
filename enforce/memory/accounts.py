# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How much device memory each container has, and what is decided about it: the data types. Pure, standard library only.

NVML's bytes are the truth where it reports them: they include contexts and what the driver rounds up. The kernel can
only count calls. The difference of the two, the overhead, moves slowly; each limit for the kernel is less by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.core.model import ContainerKey, DeviceUuid, ProcessId

_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one container on one device. Both figures are of one tick."""

    nvml_bytes: int | None  # None: NVML does not report it
    live_bytes: int  # by the calls that the probes saw; without pinned host memory
    pooled: bool = False  # it has allocated from a pool, which keeps what is freed

    @property
    def bytes(self) -> int:
        """NVML's figure, or the probes' where there is none."""
        return self.live_bytes if self.nvml_bytes is None else self.nvml_bytes


NO_MEMORY = DeviceMemory(None, 0)


@dataclass(frozen=True, slots=True)
class MemoryClaim:
    """Memory that an online rule reserves, on each device where its container is; without one, on every device."""

    rule: str
    reserve_bytes: int
    container: ContainerKey | None
    held_bytes: Mapping[DeviceUuid, int]

    def needs(self, device: DeviceUuid) -> int:
        """What has to be free there so that it can have its reserve."""
        if self.container is not None and device not in self.held_bytes:
            return 0
        return max(0, self.reserve_bytes - self.held_bytes.get(device, 0))


@dataclass(frozen=True, slots=True)
class MemoryTenant:
    """An offline container."""

    container: ContainerKey
    quota_bytes: int | None  # on each device
    weight: float
    started_ticks: int  # of its oldest process
    holdings: Mapping[DeviceUuid, DeviceMemory]
    rungs: tuple[str, ...]  # of swap and evict: those on its ladder that can be done here and now, the mildest first
    max_hold_ns: int
    waiting_since_ns: int | None = None  # since when one of its allocations has not returned
    processes: frozenset[ProcessId] = frozenset()  # on a GPU, now

    def on(self, device: DeviceUuid) -> DeviceMemory:
        """Its memory there."""
        return self.holdings.get(device, NO_MEMORY)


@dataclass(frozen=True, slots=True)
class MemoryView:
    """One tick's memory. `free_bytes`: of each device that is not lost; None where it is unknown."""

    at_ns: int  # of the snapshot
    free_bytes: Mapping[DeviceUuid, int | None]
    claims: tuple[MemoryClaim, ...]
    tenants: tuple[MemoryTenant, ...]
    acting: bool = True  # False: nothing is done, so what was planned counts as done
    holders: Mapping[DeviceUuid, frozenset[ProcessId]] = field(default_factory=dict)  # processes that NVML has there

    def needed(self, device: DeviceUuid) -> int:
        """What has to stay free there for online containers."""
        return sum(claim.needs(device) for claim in self.claims)

    def room(self, device: DeviceUuid) -> int | None:
        """What offline work may still take there; negative: it has too much. None: no reserve, or unknown."""
        free = self.free_bytes.get(device)
        reserved = any(claim.container is None or device in claim.held_bytes for claim in self.claims)
        return free - self.needed(device) if reserved and free is not None else None


@dataclass(frozen=True, slots=True)
class Overhead:
    """What a container has on a device beyond its allocations, by the last ticks.

    The least of them counts: an allocation between two readings of a tick looks like overhead, and a limit that is too
    tight fails a program. What a pool keeps looks like overhead as well, and is no reason to refuse what fits in it:
    for a container with a pool the least that was ever seen counts.
    """

    samples: tuple[int, ...] = ()
    pooled: bool = False

    @property
    def bytes(self) -> int:
        return min(self.samples, default=0)

    def after(self, holding: DeviceMemory) -> Overhead:
        """With one more tick."""
        pooled = self.pooled or holding.pooled
        if holding.nvml_bytes is None:
            return Overhead(self.samples, pooled)
        now = max(0, holding.nvml_bytes - holding.live_bytes)
        if pooled:
            return Overhead((min(now, self.bytes) if self.samples else now,), pooled)
        return Overhead((*self.samples, now)[-_SAMPLES:], pooled)


@dataclass(frozen=True, slots=True)
class MemoryDecision:
    """One act on a container for memory's sake. None: unknown."""

    wall_ns: int
    container: str
    device: str  # "": on any of its devices
    rule: str
    act: str  # "deny" | "hold" | "swap" | "evict" | "restore"
    count: int  # allocations that were denied or held since the last line's; 1 for what is done to a container
    held_bytes: int  # that it has
    source: str  # of held_bytes: "nvml" | "probes"
    quota_bytes: int | None
    reason: str
    acted: bool


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """The memory limits of one container, and what they refused."""

    quota_bytes: int | None
    denied: int
    held: int
