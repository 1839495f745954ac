# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Slots, from what the agents export: GPUs that are healthy, protected, and have room for an offline job.

Invariant: a GPU of which anything is missing, stale or impossible is no slot, and is counted with the reason. So where
Prometheus or an agent is away, or lies, nothing new is placed there.

Loads and gaps are means over the window; of memory the most that was used in it counts, and of the online service's
latency the worst. The online service's kind is the policy rule that matches it: a rule names a service.
"""

from __future__ import annotations

import http.client
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fleet.deadlines import fetch
from fleet.model import FleetError, Slot

_LONGEST_ANSWER = 256 << 20
CONTAINER: Final = ("instance", "container", "pod", "namespace", "runtime", "id")
DEVICE: Final = ("instance", "UUID")

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row of the answer to an instant query."""

    labels: Labels
    value: float

    def key(self, names: Sequence[str]) -> tuple[str, ...]:
        return tuple(self.labels.get(name, "") for name in names)


Query = Callable[[str], Sequence[Sample]]


@dataclass(frozen=True, slots=True)
class Settings:
    """What counts as fresh and as free."""

    window: str = "15m"
    """As PromQL writes it"""
    stale_s: float = 60.0
    """Age of an agent's snapshot beyond which its GPUs are no slots"""


@dataclass(frozen=True, slots=True)
class Found:
    """What Prometheus knows of."""

    slots: tuple[Slot, ...]
    """By node and UUID"""
    unknown: Counter[str]
    """Reason → GPUs that are no slots"""


def prometheus(url: str, timeout_s: float = 10.0, at_s: float | None = None) -> Query:
    """Instant queries to the server at this URL. `at_s`: of that time since 1970; None: now."""
    time = {} if at_s is None else {"time": f"{at_s:.0f}"}

    def query(expression: str) -> list[Sample]:
        address = f"{url.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': expression, **time})}"
        try:
            text = fetch(address, timeout_s, _LONGEST_ANSWER)
        except urllib.error.HTTPError as error:
            raise FleetError(f"Prometheus at {url} refused a query: {_said(error)}", 3) from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise FleetError(f"Prometheus at {url} does not answer: {error}; is the URL right?", 3) from error
        return _samples(text, url)

    return query


def _said(error: urllib.error.HTTPError) -> str:
    """Its body, if that comes in time; else the status."""
    try:
        return error.read(1000).decode(errors="replace") or str(error)
    except (OSError, ValueError, http.client.HTTPException):
        return str(error)


def _samples(text: bytes, url: str) -> list[Sample]:
    try:
        rows = json.loads(text)["data"]["result"]
        return [Sample(_labels(row["metric"]), float(row["value"][1])) for row in rows]
    except (ValueError, TypeError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise FleetError(f"{url} gives no answer that Prometheus would give; is it another server?", 3) from error


def _labels(metric: Mapping[str, object]) -> Labels:
    """TypeError: not text."""
    found = dict(metric)
    if not all(isinstance(value, str) for value in found.values()):
        raise TypeError("a label is no text")
    return {name: str(value) for name, value in found.items()}


def find_slots(query: Query, settings: Settings | None = None) -> Found:
    """All slots there are now."""
    figures = _Figures.read(query, settings or Settings())
    slots, unknown = [], Counter[str]()
    for device, info in sorted(figures.info.items()):
        found = figures.slot(device, info)
        if isinstance(found, Slot):
            slots.append(found)
        elif found:
            unknown[found] += 1
    return Found(tuple(slots), unknown)


Device = tuple[str, ...]
"""Node and UUID"""
Key = tuple[str, ...]
"""A container on a node"""


@dataclass(frozen=True, slots=True)
class _Figures:
    """The answers, by device or by container."""

    info: Mapping[Device, Labels]
    parents: frozenset[str]
    """UUIDs of GPUs in MIG mode"""
    twice: frozenset[str]
    """UUIDs that two nodes report"""
    ages: Mapping[str, float]
    """By node"""
    stale_s: float
    healthy: Mapping[Device, float]
    enforcing: Mapping[str, float]
    roles: Mapping[Key, tuple[str, str]]
    """Container → role and rule"""
    users: Mapping[Device, frozenset[Key]]
    """Containers that use it, or that it is assigned to"""
    size: Mapping[Device, float]
    used: Mapping[Device, float]
    """Now, by all"""
    used_by: Mapping[tuple[Device, Key], float]
    """Now, by one container …"""
    most_used: Mapping[tuple[Device, Key], float]
    """… and at its most, in the window"""
    load: Mapping[Device, float]
    gaps_per_s: Mapping[Device, float]
    promises: tuple[tuple[Mapping[Key, float], Mapping[Key, float]], ...]
    """Targets and latencies: of the quantile of the SLO, and of its second one where it has one"""

    @classmethod
    def read(cls, query: Query, settings: Settings) -> _Figures:
        window = settings.window

        def devices(expression: str) -> dict[Device, float]:
            return {one.key(DEVICE): one.value for one in query(expression)}

        def containers(expression: str) -> dict[Key, float]:
            return {one.key(CONTAINER): one.value for one in query(expression)}

        def nodes(expression: str) -> dict[str, float]:
            return {one.labels.get("instance", ""): one.value for one in query(expression)}

        def promise(of: str) -> tuple[dict[Key, float], dict[Key, float]]:
            latency = f"max_over_time(gpuwarden_container_slo{of}_latency_seconds[{window}])"
            return containers(f"gpuwarden_container_slo{of}_target_seconds"), containers(latency)

        used_by = query("gpuwarden_container_memory_bytes")
        most_used = query(f"max_over_time(gpuwarden_container_memory_bytes[{window}])")
        roles = query("gpuwarden_container_role_info")
        info = {one.key(DEVICE): one.labels for one in query("gpuwarden_device_info")}
        uses = Counter(uuid for _, uuid in info)
        return cls(
            info=info,
            parents=frozenset(labels["parent"] for labels in info.values() if labels.get("parent")),
            twice=frozenset(uuid for uuid, count in uses.items() if count > 1),
            ages=nodes("time() - gpuwarden_snapshot_timestamp_seconds"),
            stale_s=settings.stale_s,
            healthy=devices('gpuwarden_device_health{state="healthy"}'),
            enforcing=nodes("gpuwarden_enforcing"),
            roles={one.key(CONTAINER): (one.labels.get("role", ""), one.labels.get("rule", "")) for one in roles},
            users=_grouped((*used_by, *query("gpuwarden_device_held_info"))),
            size=devices("gpuwarden_device_memory_size_bytes"),
            used=devices("gpuwarden_device_memory_used_bytes"),
            used_by={(one.key(DEVICE), one.key(CONTAINER)): one.value for one in used_by},
            most_used={(one.key(DEVICE), one.key(CONTAINER)): one.value for one in most_used},
            load=devices(f"rate(gpuwarden_device_online_busy_seconds_total[{window}])"),
            gaps_per_s=devices(f"rate(gpuwarden_device_online_gaps_total[{window}])"),
            promises=(promise(""), promise("_also")),
        )

    def slot(self, device: Device, info: Labels) -> Slot | str | None:
        """The slot, or why it is none; None: no device that jobs are given, as its MIG instances are."""
        node, uuid = device
        if uuid in self.parents:
            return None
        if reason := self._unfit(device):
            return reason
        online = sorted(key for key in self.users.get(device, ()) if self._role(key) == "online")
        gaps_per_s, load, free = self.gaps_per_s.get(device), self.load.get(device), self._free(device, online)
        if online and (load is None or gaps_per_s is None or (load > 0 and not gaps_per_s > 0)):
            return "load unknown"
        if free is None or not _are_possible(free, load or 0.0, gaps_per_s or 0.0):
            return "impossible figures"
        load = min(1.0, load) if online and load is not None else 0.0
        if not all(key in self.promises[0][0] for key in online):
            return "no latency is promised"
        slack_s = self._slack_s(online)
        if slack_s is None:
            return "impossible figures"
        return Slot(
            node=node,
            gpu=uuid,
            model=info.get("model_name", ""),
            online="+".join(sorted({self.roles[key][1] for key in online})) or None,
            load=load,
            gap_s=(1 - load) / gaps_per_s if online and gaps_per_s else math.inf,
            slack_s=slack_s,
            free_bytes=int(free),
            spatial=None,
        )

    def _unfit(self, device: Device) -> str | None:
        node, uuid = device
        if uuid in self.twice:
            return "two GPUs have its UUID"
        if not 0 <= self.ages.get(node, math.inf) + 1 <= self.stale_s + 1:  # a second ahead: clocks differ
            return "stale figures"
        if self.enforcing.get(node) != 1:
            return "not enforcing"
        if self.healthy.get(device) != 1:
            return "not healthy"
        roles = {self._role(key) for key in self.users.get(device, ())}
        if "offline" in roles:
            return "has an offline job"
        return "used by a container without a role" if roles - {"online"} else None

    def _role(self, container: Key) -> str:
        return self.roles.get(container, ("", ""))[0]

    def _free(self, device: Device, online: Iterable[Key]) -> float | None:
        """With what is used now, and the online services at their most; None: unknown or impossible.

        A job that has gone is in neither.
        """
        size, used = self.size.get(device), self.used.get(device)
        now = [self.used_by.get((device, key), 0.0) for key in online]
        most = [self.most_used.get((device, key), 0.0) for key in online]
        if size is None or used is None or not _are_possible(size, used, *now, *most):
            return None
        return size - used - sum(max(0.0, a - b) for a, b in zip(most, now, strict=True))

    def _slack_s(self, online: Collection[Key]) -> float | None:
        """The least; infinite where no online service is. Before its first request all of the target is left.

        None: impossible figures.
        """
        slacks = [math.inf]
        for targets, latencies in self.promises:
            for key in targets.keys() & online:
                if not _are_possible(targets[key], latencies.get(key, 0.0)):
                    return None
                slacks.append(targets[key] - latencies.get(key, 0.0))
        return max(0.0, min(slacks))


def _grouped(samples: Iterable[Sample]) -> dict[Device, frozenset[Key]]:
    users = defaultdict[Device, set[Key]](set)
    for one in samples:
        users[one.key(DEVICE)].add(one.key(CONTAINER))
    return {device: frozenset(keys) for device, keys in users.items()}


def _are_possible(*figures: float) -> bool:
    return all(math.isfinite(figure) and figure >= 0 for figure in figures)
