# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Our workloads as tenants of a GPU: what each is to do, and what it did, from its own words.

SM time is that of the whole device: a kernel on half of the SMs takes half of its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from conformance.clients import workload as spin_workload
from conformance.clients.workload import Pace, Workload

_MIB: Final = 1 << 20
Series = Sequence[tuple[int, float]]  # CLOCK_MONOTONIC ns, SM ns so far


@dataclass(frozen=True, slots=True)
class Tenant:
    """`kernels` of `kernel_us` on `sms` of the SMs in each step of `offline` or request to `online`.

    `duty_cycle`: share of the time that they take while no other tenant is there.
    """

    name: str
    program: str
    kernels: int
    kernel_us: int
    sms: float
    duty_cycle: float
    memory_bytes: int = 0
    copy_bytes: int = 0  # each step to the device, each request from it

    @property
    def allocated_bytes(self) -> int:
        """Device memory that it allocates by cuMemAlloc."""
        return self.memory_bytes + self.copy_bytes

    def words(self, pace: Pace, sm_count: int, folder: Path) -> list[str]:
        """Its program and options, as a command line."""
        return self._online(pace, sm_count, folder) if self.program == "online" else self._offline(pace, sm_count)

    def _offline(self, pace: Pace, sm_count: int) -> list[str]:
        pause = spin_workload.pause_us(pace, self.kernels, self.kernel_us, self.duty_cycle)
        blocks = max(1, round(sm_count * self.sms))
        shape = spin_workload.steps(pace, kernels=self.kernels, kernel_us=self.kernel_us, blocks=blocks, host_us=pause)
        return [*shape, "--memory", str(self.memory_bytes), "--copy-bytes", str(self.copy_bytes)]

    def _online(self, pace: Pace, sm_count: int, folder: Path) -> list[str]:
        rate = self.duty_cycle / pace.seconds(self.kernels, self.kernel_us)
        blocks = max(1, round(sm_count * self.sms))
        shape = ["--kernels", str(self.kernels), "--kernel-us", str(self.kernel_us), "--blocks", str(blocks)]
        copies = ["--threads", "1024", "--copy-bytes", str(self.copy_bytes), *pace.options]
        ending = ["--seconds", "600", "--start-now", "--log", str(folder / f"{self.name}.log")]
        return ["online", "--rate", f"{rate:.3f}", *shape, *copies, *ending]


@dataclass(frozen=True, slots=True)
class TenantWork:
    """What a tenant did by its own count. `sm`: how its SM time grew."""

    kernels: int
    to_device_bytes: int
    from_device_bytes: int
    sm: Series


def did(tenant: Tenant, workload: Workload, summary: Mapping[str, Any], pace: Pace, folder: Path) -> TenantWork:
    """Its work, after its end."""
    kernel_sm_ns = pace.seconds(1, tenant.kernel_us) * 1e9 * tenant.sms
    started_ns = int(summary["started_monotonic_ns"])
    ended_ns = started_ns + round(float(summary["elapsed_seconds"]) * 1e9)
    if tenant.program == "online":
        kernels = int(summary["requests"]) * tenant.kernels
        ends = request_ends((folder / f"{tenant.name}.log").read_text(), started_ns)
        reported = [(at, (count + 1) * tenant.kernels) for count, at in enumerate(ends)]
        copied = (0, int(summary["requests"]) * tenant.copy_bytes)
    else:
        kernels, reported = int(summary["kernels"]), workload.kernels
        copied = (int(summary["copied_bytes"]), 0)
    points = [(started_ns, 0), *(point for point in reported if started_ns < point[0] < ended_ns), (ended_ns, kernels)]
    return TenantWork(kernels, *copied, [(at, count * kernel_sm_ns) for at, count in points])


def request_ends(log: str, started_ns: int) -> list[int]:
    """When each request was done, in order. Lines of arrival, latency and service in seconds; a cut one is left out."""
    lines = [line.split() for line in log.split("\n")[:-1]]
    return sorted(started_ns + round((float(words[0]) + float(words[1])) * 1e9) for words in lines)


# Each of them has room: together they take less than the device has.
WITH_ROOM: Final = (
    Tenant("steady", "offline", 20, 500, 1.0, 0.30, memory_bytes=512 * _MIB),
    Tenant("narrow", "offline", 10, 1000, 0.5, 0.30, memory_bytes=256 * _MIB, copy_bytes=4 * _MIB),
    Tenant("service", "online", 10, 200, 1.0, 0.10, copy_bytes=1 * _MIB),
)
ALONE: Final = (Tenant("single", "offline", 10, 1000, 0.75, 0.5, memory_bytes=256 * _MIB, copy_bytes=2 * _MIB),)
# One of them takes whatever is left.
CROWDED: Final = (
    Tenant("greedy", "offline", 50, 1000, 1.0, 1.0),
    Tenant("caller", "online", 20, 100, 1.0, 0.15, copy_bytes=1 * _MIB),
)
BESIDE_PYTORCH: Final = (Tenant("beside", "offline", 20, 500, 1.0, 0.30),)
