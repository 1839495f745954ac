# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A policy as the agent uses it: frozen, in base units, standard library only.

`classify` is pure. Only containers of `Role.OFFLINE` may be acted on. The names of signals, laws and ladder rungs are
kept apart from their implementations so that `gpuwarden check` needs none of them; a test compares the two lists.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Literal, get_args

from agent.core.model import Device
from enforce.policy.matching import ContainerFacts, Match, ProcessFacts

__all__ = [  # ContainerFacts, Match and ProcessFacts come from matching
    "Annotations",
    "Bounds",
    "Classification",
    "ContainerFacts",
    "HealthRule",
    "HttpSource",
    "Limits",
    "Match",
    "OfflineRule",
    "OnlineRule",
    "Pcie",
    "PeriodicRule",
    "Policy",
    "ProcessFacts",
    "PrometheusSource",
    "Role",
    "Rule",
    "Slo",
    "Source",
    "Tuning",
    "UprobeSource",
]


LatencySignal = Literal["gpu_wait", "http", "prometheus", "uprobe"]
Law = Literal["headroom", "fixed", "tgs", "off"]
Rung = Literal["pace", "gate", "deny", "hold", "freeze", "mps", "lock", "swap", "evict"]
Unprobed = Literal["ignore", "report", "freeze", "evict"]
TimeUnit = Literal["s", "ms", "us"]
SIGNALS: tuple[str, ...] = get_args(LatencySignal)
LAWS: tuple[str, ...] = get_args(Law)
RUNGS: tuple[str, ...] = get_args(Rung)


class Role(StrEnum):
    """The role of a container under the policy."""

    ONLINE = "online"
    OFFLINE = "offline"
    PERIODIC = "periodic"
    PROTECTED = "protected"
    UNMATCHED = "unmatched"


@dataclass(frozen=True, slots=True)
class HttpSource:
    """Requests to a port; only those whose path begins with `path`, if one is given.

    `statuses`: the first digits of those whose requests have a latency.
    """

    port: int
    path: str | None = None
    statuses: tuple[int, ...] = (2, 3)


@dataclass(frozen=True, slots=True)
class PrometheusSource:
    """A classic histogram on a page of metrics: the sum of all its series with these labels."""

    url: str
    metric: str  # without _bucket
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name → patterns, of which one must match
    unit_ns: int = 1_000_000_000  # what 1 means in `le`


@dataclass(frozen=True, slots=True)
class UprobeSource:
    """A function of a file inside the container, by `symbol` or by `offset` in the file; the other is None."""

    binary: str
    symbol: str | None = None
    offset: int | None = None
    nothrow: bool = False  # no exception leaves the function, by the policy


Source = HttpSource | PrometheusSource | UprobeSource


@dataclass(frozen=True, slots=True)
class Slo:
    """The objective: `quantile` of the signal's latency over `window_ns` stays under `target_ns`.

    `also`: a second, lower quantile of the same requests with a target of its own; it has no further one.
    """

    signal: str
    quantile: float  # 0–1, both excluded
    target_ns: int
    window_ns: int
    min_samples: int  # fewer in the window: unknown
    source: Source | None = None  # where the signal is read; None for gpu_wait
    also: Slo | None = None

    def slack_ratio(self, latency_ns: float) -> float:
        """How much of the target is left, as a ratio of it; negative where the latency misses it."""
        return (self.target_ns - latency_ns) / self.target_ns


@dataclass(frozen=True, slots=True)
class Limits:
    """How far an offline container may be slowed. None: no limit by the policy."""

    memory_bytes: int | None
    floor_ratio: float
    max_pause_ns: int
    max_queued_ns: int | None
    max_hold_ns: int = 30_000_000_000
    evict_grace_ns: int = 30_000_000_000


@dataclass(frozen=True, slots=True)
class OnlineRule:
    """Containers with an SLO."""

    name: str
    match: Match
    slo: Slo
    reserve_bytes: int | None = None  # device memory that stays available to it


@dataclass(frozen=True, slots=True)
class OfflineRule:
    """Containers that may be slowed. `share_ratio` is there if and only if `law` is fixed."""

    name: str
    match: Match
    law: str
    share_ratio: float | None
    weight: float
    limits: Limits
    ladder: tuple[str, ...]
    unprobed: str = "report"  # what is done where its work has no launches that the probes see


@dataclass(frozen=True, slots=True)
class PeriodicRule:
    """Containers whose requests come once a period and have a deadline, after which they are of no use."""

    name: str
    match: Match
    period_ns: int
    deadline_ns: int  # from the begin of a request; at most the period
    max_pause_ns: int


Rule = OnlineRule | OfflineRule | PeriodicRule


@dataclass(frozen=True, slots=True)
class Tuning:
    """The control loop's own times; `enforce.policy.schema.TuningSection` explains each."""

    decide_interval_ns: int
    gate_hold_ns: int
    gate_open_delay_ns: int
    no_data_hold_ns: int
    tgs_sample_ns: int


@dataclass(frozen=True, slots=True)
class Pcie:
    """Whether copies between host and device are paced. `bytes_per_second`: of a link; None: as NVML gives it."""

    pace: bool = False
    bytes_per_second: int | None = None


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on a device's readings, beyond which its health counts as bad. None: no bound."""

    utilization_ratio: float | None = None  # of devices that report no SM activity
    sm_activity_ratio: float | None = None
    memory_ratio: float | None = None
    sm_clock_hertz: float | None = None  # the least, while it works


@dataclass(frozen=True, slots=True)
class HealthRule:
    """How the health of devices is judged. `devices`: patterns of their names or UUIDs."""

    devices: tuple[str, ...] = ("*",)
    unhealthy: Bounds = Bounds()
    overlimit: Bounds = Bounds()
    patience_ns: int = 5_000_000_000
    init_ns: int = 0
    hold_off_ns: int = 30_000_000_000
    hold_off_most_ns: int = 1_800_000_000_000
    clean_ns: int = 600_000_000_000
    forgive_ns: int = 600_000_000_000


@dataclass(frozen=True, slots=True)
class Annotations:
    """Patterns of the namespaces whose pods may declare their role by annotations; empty: none may."""

    online: tuple[str, ...] = ()
    offline: tuple[str, ...] = ()
    periodic: tuple[str, ...] = ()


DEFAULT_HEALTH = HealthRule()  # XIDs and lost devices only


@dataclass(frozen=True, slots=True)
class Classification:
    """The role of a container, its rule, and why. `conflict` names the rules that match it and exclude each other.

    `misconfigured`: the policy or its pod meant it to have a role; the reason says what is wrong.
    """

    role: Role
    rule: Rule | None = None
    reason: str = "no rule matches"
    conflict: tuple[str, ...] = ()
    misconfigured: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy of one file."""

    enforce: bool
    online: tuple[OnlineRule, ...]
    offline: tuple[OfflineRule, ...]
    protect: tuple[Match, ...]
    tuning: Tuning
    health: tuple[HealthRule, ...] = ()
    annotations: Annotations = Annotations()
    pcie: Pcie = Pcie()
    periodic: tuple[PeriodicRule, ...] = ()

    def health_of(self, device: Device) -> HealthRule:
        """The first rule that names the device; without one there are no bounds."""
        named = (device.name, device.uuid)
        rules = (rule for rule in self.health if any(fnmatchcase(n, p) for n in named for p in rule.devices))
        return next(rules, DEFAULT_HEALTH)

    def classify(self, facts: ContainerFacts) -> Classification:
        """The container's role. `protect` wins over every rule; two rules, not both online: left alone."""
        if any(match.fits(facts, every_process=False) for match in self.protect):
            return Classification(Role.PROTECTED, reason="listed under protect")
        online = [rule for rule in self.online if rule.match.fits(facts, every_process=False)]
        offline = [rule for rule in self.offline if rule.match.fits(facts, every_process=True)]
        periodic = [rule for rule in self.periodic if rule.match.fits(facts, every_process=False)]
        rules: tuple[Rule, ...] = (*online, *offline, *periodic)
        names = tuple(rule.name for rule in rules)
        conflict = names if len(names) > 1 else ()
        if (offline or periodic) and conflict:
            reason = f"matched by {' and '.join(names)}: left alone"
            return Classification(Role.UNMATCHED, None, reason, conflict, misconfigured=True)
        if offline:
            return Classification(Role.OFFLINE, offline[0], f"rule {names[0]}")
        if periodic:
            return Classification(Role.PERIODIC, periodic[0], f"rule {names[0]}")
        if online:
            # Two SLOs for one container do no harm: the first in the file applies, the conflict is reported.
            return Classification(Role.ONLINE, online[0], f"rule {names[0]}", conflict)
        return Classification(Role.UNMATCHED)


MOST_SAMPLES = 1_000_000  # that an SLO may ask for in its window
MEMORY_RUNGS = ("deny", "hold", "swap", "evict")  # those that keep limits.memory and online[].reserve

# The keys of `slo` that belong to one signal each, and those that the signal requires.
SIGNAL_KEYS: dict[str, tuple[str, ...]] = {
    "gpu_wait": (),
    "http": ("port", "path", "status"),
    "prometheus": ("url", "metric", "labels", "unit"),
    "uprobe": ("binary", "symbol", "offset", "nothrow"),
}

NEEDED_KEYS: dict[str, tuple[str, ...]] = {
    "gpu_wait": (),
    "http": ("port",),
    "prometheus": ("url", "metric"),
    "uprobe": ("binary",),
}

UNITS_NS: dict[str, int] = {"s": 1_000_000_000, "ms": 1_000_000, "us": 1_000}  # of a histogram's `le`
