# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A policy as the product carries it: frozen, in base units, standard library only.

`classify` is pure. Whoever acts may act on `Role.OFFLINE` only.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from agent.model import Device
from enforce.policy.matching import Facts, Match, ProcessFacts

__all__ = ["Annotations", "Bounds", "Classification", "Facts", "HealthRule", "HttpSource", "Limits", "Match"]
__all__ += ["OfflineRule", "OnlineRule", "Policy", "ProcessFacts", "PrometheusSource", "Role", "Slo", "Source"]
__all__ += ["Tuning", "UprobeSource"]


class Role(StrEnum):
    """What a container is to the policy."""

    ONLINE = "online"
    OFFLINE = "offline"
    PROTECTED = "protected"
    UNMATCHED = "unmatched"


@dataclass(frozen=True, slots=True)
class HttpSource:
    """Requests that come in at a port; only those whose path begins so, if one is given."""

    port: int
    path: str | None = None


@dataclass(frozen=True, slots=True)
class PrometheusSource:
    """A classic histogram on a page of metrics: all its series that have such labels, added up."""

    url: str
    metric: str  # without _bucket
    labels: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name → patterns, of which one must match
    unit_ns: int = 1_000_000_000  # what 1 means in `le`


@dataclass(frozen=True, slots=True)
class UprobeSource:
    """A function of a file that the container sees; by `symbol` or by `offset` in the file, the other is None."""

    binary: str
    symbol: str | None = None
    offset: int | None = None
    nothrow: bool = False  # its owner says that no exception leaves it


Source = HttpSource | PrometheusSource | UprobeSource


@dataclass(frozen=True, slots=True)
class Slo:
    """The promise: `quantile` of the signal's latency over `window_ns` stays under `target_ns`."""

    signal: str
    quantile: float  # 0–1, both excluded
    target_ns: int
    window_ns: int
    min_samples: int  # fewer in the window: unknown
    source: Source | None = None  # what the signal needs beyond its name


@dataclass(frozen=True, slots=True)
class Limits:
    """How far an offline container may be slowed. None: no limit of the policy's."""

    memory_bytes: int | None
    floor_ratio: float
    max_pause_ns: int
    max_queued_ns: int | None
    max_hold_ns: int = 30_000_000_000
    evict_grace_ns: int = 30_000_000_000


@dataclass(frozen=True, slots=True)
class OnlineRule:
    """Containers with a promise."""

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


@dataclass(frozen=True, slots=True)
class Tuning:
    """The control loop's own times; `enforce.policy.schema.TuningSection` explains each."""

    decide_interval_ns: int
    gate_hold_ns: int
    gate_open_delay_ns: int
    no_data_hold_ns: int
    tgs_sample_ns: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a device may show before its health counts as bad. None: no bound."""

    utilization_ratio: float | None = None  # of devices that tell no SM activity
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
    """Patterns of the namespaces whose pods may say by annotations what they are; empty: none may."""

    online: tuple[str, ...] = ()
    offline: tuple[str, ...] = ()


DEFAULT_HEALTH = HealthRule()  # XIDs and lost devices only


@dataclass(frozen=True, slots=True)
class Classification:
    """What a container is, by which rule, and why. `conflict` names the rules that claim it against each other.

    `amiss`: its owner meant something else; the reason says what is wrong.
    """

    role: Role
    rule: OnlineRule | OfflineRule | None = None
    reason: str = "no rule matches"
    conflict: tuple[str, ...] = ()
    amiss: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """One policy file."""

    enforce: bool
    online: tuple[OnlineRule, ...]
    offline: tuple[OfflineRule, ...]
    protect: tuple[Match, ...]
    tuning: Tuning
    health: tuple[HealthRule, ...] = ()
    annotations: Annotations = Annotations()

    def health_of(self, device: Device) -> HealthRule:
        """The first rule that names the device; without one its bounds are none."""
        named = (device.name, device.uuid)
        rules = (rule for rule in self.health if any(fnmatchcase(n, p) for n in named for p in rule.devices))
        return next(rules, DEFAULT_HEALTH)

    def classify(self, facts: Facts) -> Classification:
        """The container's role. `protect` beats every rule; whatever an offline rule disputes is left alone."""
        if any(match.fits(facts, every_process=False) for match in self.protect):
            return Classification(Role.PROTECTED, reason="listed under protect")
        online = [rule for rule in self.online if rule.match.fits(facts, every_process=False)]
        offline = [rule for rule in self.offline if rule.match.fits(facts, every_process=True)]
        names = (*(rule.name for rule in online), *(rule.name for rule in offline))
        conflict = names if len(names) > 1 else ()
        if offline and conflict:
            reason = f"claimed by {' and '.join(names)}: left alone"
            return Classification(Role.UNMATCHED, None, reason, conflict, amiss=True)
        if offline:
            return Classification(Role.OFFLINE, offline[0], f"rule {names[0]}")
        if online:
            # Two promises to one container endanger nobody: the first in the file holds, the clash is reported.
            return Classification(Role.ONLINE, online[0], f"rule {names[0]}", conflict)
        return Classification(Role.UNMATCHED)
