# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What happened on GPUs with an offline pod in a window of time that is over, from the agents' counters.

Invariant: what was there only for a part of the window, or shared its GPU with another offline container, gives no
throughput. A promise counts as missed where more requests were slower than its target than its
quantile allows, and at least LEAST_SLOW of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from typing import Final, TypedDict

from fleet.model import Job
from fleet.sources.prometheus import CONTAINER, DEVICE, Query
from fleet.weights.experience import Miss, Sight
from fleet.weights.table import Pair

LEAST_SLOW: Final = 10.0

_Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Running:
    """A pod that has a GPU, or had one until lately."""

    job: Job
    expected: float | None
    """Throughput when it was placed"""


@dataclass(frozen=True, slots=True)
class _Device:
    """One GPU in the window."""

    model: str
    online: Mapping[_Key, float]
    """Container → launches in the window"""
    offline: Mapping[_Key, float]
    rules: Mapping[_Key, str]

    @property
    def kind(self) -> str | None:
        """As a slot of it is called."""
        return "+".join(sorted({self.rules[key] for key in self.online})) or None


def sights(query: Query, running: Mapping[str, Running], window: str, window_s: float) -> Iterator[Sight]:
    """Throughputs. `running`: namespace/name → pod; `window`: as PromQL writes its length."""
    before = {
        (one.key(DEVICE), one.key(CONTAINER)) for one in query(f"gpuwarden_container_launches_total offset {window}")
    }
    load = _by_device(query, f"rate(gpuwarden_device_online_busy_seconds_total[{window}])")
    gaps_per_s = _by_device(query, f"rate(gpuwarden_device_online_gaps_total[{window}])")
    for device, found in _devices(query, window).items():
        if len(found.offline) != 1 or any((device, key) not in before for key in (*found.offline, *found.online)):
            continue
        ((key, launches),) = found.offline.items()
        pod = running.get(_pod(key))
        busy, gaps = load.get(device), gaps_per_s.get(device)
        if pod is not None:
            yield Sight(
                job=pod.job,
                expected=pod.expected,
                model=found.model,
                online=found.kind,
                launches_per_s=launches / window_s,
                **_load_of(busy, gaps),
            )


class _Load(TypedDict):
    load: float | None
    gap_s: float | None


def _load_of(busy: float | None, gaps_per_s: float | None) -> _Load:
    """Of the online service; without a request there is one gap without an end. None: unknown."""
    if busy is None or gaps_per_s is None or not (0 <= busy < inf and 0 <= gaps_per_s < inf):
        return _Load(load=None, gap_s=None)
    if gaps_per_s > 0:
        return _Load(load=min(1.0, busy), gap_s=max(0.0, 1 - busy) / gaps_per_s)
    return _Load(load=None, gap_s=None) if busy > 0 else _Load(load=0.0, gap_s=inf)


def misses(query: Query, running: Mapping[str, Running], window: str) -> Iterator[Miss]:
    """Pods that worked beside a service that missed its promise."""
    slow = _by_container(query, f"increase(gpuwarden_container_slo_slow_requests_total[{window}])")
    requests = _by_container(query, f"increase(gpuwarden_container_slo_requests_total[{window}])")
    quantiles = _by_container(query, f"max_over_time(gpuwarden_container_slo_quantile_ratio[{window}])")
    missed = {
        key
        for key, count in slow.items()
        if count >= LEAST_SLOW and key in quantiles and count > (1 - quantiles[key]) * requests.get(key, 0.0)
    }
    if not missed:
        return
    for found in _devices(query, window).values():
        if found.kind is None or missed.isdisjoint(found.online):
            continue
        for key, launches in found.offline.items():
            pod = running.get(_pod(key))
            if pod is not None and launches > 0:
                yield Miss(_pod(key), Pair(found.kind, pod.job.kind, found.model))


def _devices(query: Query, window: str) -> dict[_Key, _Device]:
    """Those of a known model with an offline container, and beside it online ones alone."""
    roles = {
        one.key(CONTAINER): (one.labels.get("role", ""), one.labels.get("rule", ""))
        for one in query(f"max_over_time(gpuwarden_container_role_info[{window}])")
    }
    models = {one.key(DEVICE): one.labels.get("model_name", "") for one in query("gpuwarden_device_info")}
    users: dict[_Key, dict[_Key, float]] = defaultdict(dict)
    for one in query(f"increase(gpuwarden_container_launches_total[{window}])"):
        if 0 <= one.value < inf:
            users[one.key(DEVICE)][one.key(CONTAINER)] = one.value
    found = {}
    for device, containers in users.items():
        by_role: dict[str, dict[_Key, float]] = defaultdict(dict)
        for key, launches in containers.items():
            by_role[roles.get(key, ("", ""))[0]][key] = launches
        others = any(
            launches > 0 for role in by_role.keys() - {"online", "offline"} for launches in by_role[role].values()
        )
        if by_role["offline"] and models.get(device) and not others:
            rules = {key: roles[key][1] for key in by_role["online"]}
            found[device] = _Device(models[device], by_role["online"], by_role["offline"], rules)
    return found


def _pod(container: _Key) -> str:
    labels = dict(zip(CONTAINER, container, strict=True))
    return f"{labels['namespace']}/{labels['pod']}"


def _by_device(query: Query, expression: str) -> dict[_Key, float]:
    return {one.key(DEVICE): one.value for one in query(expression)}


def _by_container(query: Query, expression: str) -> dict[_Key, float]:
    return {one.key(CONTAINER): one.value for one in query(expression)}
