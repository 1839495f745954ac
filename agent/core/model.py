# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The data model of observing: identities, readings, and the immutable snapshot of one tick.

Unknown is `None`, never 0. Ratios are 0–1 of one whole device. Standard library only. DeviceReading, EnforcementStatus
and Snapshot are wider than other classes: they are the documents of the JSON interface, where fields are only added.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType

DeviceUuid = NewType("DeviceUuid", str)  # "GPU-…" (or "MIG-…"), as NVML writes it
ContainerKey = NewType("ContainerKey", str)  # unique on the node and stable for the container's life

HOST = ContainerKey("host")  # everything that is in no container and no systemd unit


class Provenance(StrEnum):
    """Whether a figure was read from hardware or estimated."""

    MEASURED = "measured"
    ESTIMATED = "estimated"


# A tuple, as it is the key of most tables: a dataclass is hashed and compared in Python, at four times the cost.
class ProcessId(NamedTuple):
    """Identity of a process: its pid, and its start time against pid reuse.

    `start_ticks` is field 22 of /proc/PID/stat: 1/100 s since boot; the probes compute the same from start_boottime.
    """

    tgid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Container:
    """A container, systemd unit or the host: what a process belongs to, as people name it.

    `runtime` is one of docker, containerd, cri-o, podman, lxc, slurm, runc, systemd, host.
    """

    key: ContainerKey
    name: str
    runtime: str
    id: str = ""  # the runtime's full id; "" for systemd units and the host
    pod: str | None = None
    namespace: str | None = None
    image: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    cgroup: str = "/"  # path below the hierarchy's root
    annotations: Mapping[str, str] = field(default_factory=dict)  # its pod's, of gpuwarden.io/ only
    uid: int | None = None  # the user who may name cgroups where it lies; null: root alone


@dataclass(frozen=True, slots=True)
class Process:
    """A process that uses a GPU."""

    id: ProcessId
    command: str
    user: str
    container: ContainerKey


@dataclass(frozen=True, slots=True)
class Device:
    """What does not change about a GPU while the driver stays loaded."""

    index: int  # NVML's index, not a process's ordinal
    uuid: DeviceUuid
    name: str
    pci_bus_id: str
    sm_count: int | None
    memory_total_bytes: int | None
    parent: DeviceUuid | None = None  # of a MIG instance: the GPU, whose index, bus id and minor number it shares
    mig_profile: str | None = None  # "3g.40gb"
    minor: int | None = None  # N of /dev/nvidiaN
    mig_index: int | None = None  # of a MIG instance: NVML's index among the instances of the GPU
    pcie_bytes_per_second: int | None = None  # link speed in one direction, headers included; of an instance: None


@dataclass(frozen=True, slots=True)
class DeviceReading:
    """The readings of one device in one tick. Any may be missing; `lost` says that the GPU is gone."""

    device: Device
    lost: bool = False
    sm_activity_ratio: float | None = (
        None  # share of SM time with work on it (GPM SM_UTIL, or utilisation before Hopper)
    )
    sm_activity_source: str | None = None  # "gpm" | "utilization"
    memory_used_bytes: int | None = None
    memory_reserved_bytes: int | None = None
    pcie_tx_bytes_per_second: float | None = None  # device to host
    pcie_rx_bytes_per_second: float | None = None  # host to device
    dram_activity_ratio: float | None = None  # share of the memory's bandwidth that is used (GPM)
    sm_clock_hertz: float | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: float | None = None
    xid_counts: Mapping[int, int] = field(default_factory=dict)  # since the agent started
    xid_last_seen_wall_ns: Mapping[int, int] = field(default_factory=dict)  # CLOCK_REALTIME

    @property
    def memory_used_ratio(self) -> float | None:
        """Used ÷ total, where both are known."""
        used, total = self.memory_used_bytes, self.device.memory_total_bytes
        return None if used is None or not total else used / total


@dataclass(frozen=True, slots=True)
class Totals:
    """Monotonic sums since the agent first saw the owner. What Prometheus counters are made of."""

    sm_seconds: float = 0.0  # SM time ÷ number of SMs: 1.0 is one whole device for one second
    launches: int = 0  # kernels: a graph's launch counts as many as it has kernel nodes
    pcie_tx_bytes: int = 0
    pcie_rx_bytes: int = 0
    peer_tx_bytes: int = 0  # of containers: to other devices of the node, over PCIe or NVLink, which no call tells
    peer_rx_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The use of one device by one owner (container or process) during the tick."""

    device: DeviceUuid
    sm_ratio: float | None
    sm_provenance: Provenance | None
    memory_bytes: int | None
    pcie_tx_bytes_per_second: float | None
    pcie_rx_bytes_per_second: float | None
    launches_per_second: float | None
    totals: Totals = Totals()
    sm_error_ratio: float | None = None  # uncertainty of sm_ratio, ±; itself an estimate
    memory_peak_bytes: int | None = None  # most that was allocated at once, by the calls that the probes saw
    memory_by_kind: Mapping[str, int] = field(default_factory=dict)  # live, by those calls; "pinned" is host memory
    memory_by_age: Mapping[str, int] = field(default_factory=dict)  # live device memory; a leak grows old


@dataclass(frozen=True, slots=True)
class FunctionUsage:
    """A kernel function (or graph) of a container on one device during the tick."""

    name: str  # as the program asked the driver for it; "" while unknown
    device: DeviceUuid
    launches_per_second: float  # kernels
    sm_ratio: float | None
    gpu_seconds_per_launch: float | None  # estimated, of the SMs that it keeps busy
    is_graph: bool = False
    kernels_per_launch: float = 1.0  # more than one of a graph


@dataclass(frozen=True, slots=True)
class Unattributed:
    """The use of a device that is attributed to no container: device − Σ containers; never negative.

    `…_excess_…`: Σ containers − device, where that is more: something was counted twice, or read at another instant.
    """

    device: DeviceUuid
    sm_ratio: float | None
    memory_bytes: int | None
    pcie_tx_bytes_per_second: float | None
    pcie_rx_bytes_per_second: float | None
    totals: Totals = Totals()
    memory_excess_bytes: int | None = None
    pcie_tx_excess_bytes_per_second: float | None = None
    pcie_rx_excess_bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class ContainerUsage:
    """A container and its use, one entry per device that it touched."""

    container: Container
    usage: tuple[Usage, ...]
    processes: tuple[ProcessId, ...]
    functions: tuple[FunctionUsage, ...] = ()  # those with the most SM time
    unprobed: Mapping[DeviceUuid, bool] = field(default_factory=dict)  # works there without launches that are seen


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """A process and its use, one entry per device that it touched."""

    process: Process
    usage: tuple[Usage, ...]


@dataclass(frozen=True, slots=True)
class PeriodicStatus:
    """The requests of a periodic container, and whether all deadlines on its GPUs can be met. None: unknown."""

    period_seconds: float
    deadline_seconds: float
    requests_total: int | None = None  # that ended …
    misses_total: int | None = None  # … and later than their deadline
    worst_lateness_seconds: float | None = None
    request_gpu_seconds: float | None = None  # how long one of the longest of the last ten seconds had the GPU
    load_ratio: float | None = None  # up to 1 every deadline on its GPUs is met, beyond some may be missed


@dataclass(frozen=True, slots=True)
class EnforcementStatus:
    """The status of one container under enforcement, which publishes it; the agent shows and exports it."""

    role: str  # "online" | "offline" | "periodic" | "unmatched"
    rule: str | None = None  # the policy rule that matched
    latency_seconds: float | None = None  # the SLO's quantile over its window
    latency_quantile: float | None = None
    target_seconds: float | None = None
    requests_total: int | None = None  # whose latency was read, since the policy was
    slow_requests_total: float | None = None  # of these, over the target
    share_ratio: float | None = None  # what offline work may use of the device
    paused_ratio: float | None = None  # share of the last second that it was stopped: the mean over its processes
    pauses_total: int = 0  # of all its processes
    paused_seconds_total: float = 0.0  # the mean over the processes that it had meanwhile
    copy_pauses_total: int = 0  # of all these, at copies between host and device
    copy_paused_seconds_total: float = 0.0
    foreign_resumes_total: int = 0  # stops of ours that another process ended with SIGCONT
    reason: str | None = None  # one line: why this share
    rungs: tuple[str, ...] = ()  # of the ladder, beyond gate and pace: in force, or with enforce: false, would be
    troubles: Mapping[str, str] = field(default_factory=dict)  # rung → why it could not be done
    memory_quota_bytes: int | None = None  # that it may hold on a device
    allocations_denied_total: int = 0  # they returned CUDA_ERROR_OUT_OF_MEMORY without running
    allocations_held_total: int = 0  # they were stopped before they ran
    slack_ratio: float | None = None  # of the target that is left, of two the lesser; negative where it is missed
    http: Mapping[str, int] = field(default_factory=dict)  # "status:2xx", "lost:evicted" → requests, "ns:service" → sum
    also_latency_seconds: float | None = None  # the SLO's second quantile, if it has one
    also_quantile: float | None = None
    also_target_seconds: float | None = None
    launch_gpu_seconds: float | None = None  # estimated GPU time of one of its launches, the mean of its processes
    periodic: PeriodicStatus | None = None  # of a container with this role


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """Whether a device is fit for offline work, as enforcement assesses it."""

    state: str  # "init" | "healthy" | "unhealthy" | "overlimit" | "disabled"
    reason: str  # one line
    seconds: float  # in this state
    hold_seconds: float  # until it can improve at the earliest


@dataclass(frozen=True, slots=True)
class OnlineUse:
    """What the online containers of a device left of its time, since the agent started."""

    busy_seconds_total: float  # one or more of their requests ran
    gaps_total: int  # idle times between them


@dataclass(frozen=True, slots=True)
class ProbeCounts:
    """Symbols of one role in one library."""

    attached: int = 0
    absent: int = 0  # the library has no such symbol
    failed: int = 0
    off: int = 0  # they need return probes, of which there are none


@dataclass(frozen=True, slots=True)
class ProbeStatus:
    """One library's probes: how many symbols are attached, absent from the library, failed, and why, or off."""

    library: str
    attached: int
    absent: int
    failed: int
    roles: Mapping[str, ProbeCounts] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)  # symbol → why
    unknown_versions: tuple[str, ...] = ()  # exports that look like newer versions of probed calls: not seen
    off: int = 0


@dataclass(frozen=True, slots=True)
class CollectorHealth:
    """How one collector's last run went. `error` is None when it succeeded."""

    name: str
    duration_seconds: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything that was known at one tick. Immutable, so that readers may keep it."""

    at_ns: int  # CLOCK_MONOTONIC
    wall_ns: int  # CLOCK_REALTIME
    interval_ns: int  # length of the tick that the rates are over
    devices: tuple[DeviceReading, ...] = ()
    containers: tuple[ContainerUsage, ...] = ()
    processes: tuple[ProcessUsage, ...] = ()
    unattributed: tuple[Unattributed, ...] = ()
    enforcement: Mapping[ContainerKey, EnforcementStatus] = field(default_factory=dict)
    enforcing: bool = False  # False: observing, or a policy with enforce: false
    probes: tuple[ProbeStatus, ...] = ()
    collectors: tuple[CollectorHealth, ...] = ()
    lost: Mapping[str, int] = field(default_factory=dict)  # "map:reason" → events dropped since start
    container_losses: Mapping[ContainerKey, Mapping[str, int]] = field(default_factory=dict)  # beyond its share
    device_totals: Mapping[DeviceUuid, Totals] = field(default_factory=dict)
    probe_calls: Mapping[str, int] = field(default_factory=dict)  # symbol → calls seen since start
    nvml_errors: Mapping[str, int] = field(default_factory=dict)  # "call:error" → times since start
    name_lookups: Mapping[str, int] = field(default_factory=dict)  # "source:outcome" → times since start
    signal_failures: Mapping[str, int] = field(default_factory=dict)  # "rule:signal:reason" → times since the policy
    ended: tuple[ContainerUsage, ...] = ()  # their last figures, until they were scraped
    held: tuple[ContainerUsage, ...] = ()  # devices assigned to containers that do not use them
    health: Mapping[DeviceUuid, DeviceHealth] = field(default_factory=dict)  # only where a policy is
    policy_error: str | None = None  # why the policy file was refused, a mistake a line; what was in force stays so
    policy_wall_ns: int | None = None  # when the policy in force was read (CLOCK_REALTIME); null: there is none
    return_probes_off: str | None = None  # why no return probes are attached; null: they are
    online: Mapping[DeviceUuid, OnlineUse] = field(default_factory=dict)  # only where a policy is
    left_rules: Mapping[str, int] = field(default_factory=dict)  # "rule:reason" → containers that left it since start
    tick_seconds: float | None = None  # how long the tick before this one took
    decision_seconds: float | None = None  # how long the last decision took; null: none are made
