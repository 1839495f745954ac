# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How far shares are from the truth, as rows to write down; and whether the agent's figures add up. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from agent.core.model import Snapshot
from bench.attribution.recording import Recording
from bench.attribution.scenarios import Scenario
from bench.attribution.shares import SECONDS, Owner, Shares, by_job, by_tenant, container_seconds, true_seconds

MOST_MEAN: Final = 0.03
MOST_WORST: Final = 0.08
OURS: Final = "gpuwarden"
Grouping = Callable[[Recording, Mapping[Owner, float]], Mapping[Owner, float]]


@dataclass(frozen=True, slots=True)
class Errors:
    """The errors of one method in one scenario."""

    mean_abs: float
    worst: float

    @property
    def fits(self) -> bool:
        """Whether the errors are within the bounds."""
        return self.mean_abs <= MOST_MEAN and self.worst <= MOST_WORST


def errors(truth: Shares, estimates: Shares, names: Collection[str]) -> Errors:
    """Over all of `names` that either knows of; ValueError when none was on a device.

    What is attributed to another container is missing at one of these, so it counts, but once. (A process on another
    simulated GPU of the same machine is taken for a user of this one.)
    """
    owners = {owner for owner in (*truth, *estimates) if owner.name in names}
    off = [abs(truth.get(owner, 0.0) - estimates.get(owner, 0.0)) for owner in owners]
    if not off:
        raise ValueError("no container used a device: did the workloads run?")
    return Errors(sum(off) / len(off), max(off))


def rows_of(scenario: Scenario, recording: Recording) -> list[dict[str, Any]]:
    """A row per method; jobs once more, each for itself, as `…-each`."""
    groupings: dict[str, tuple[Grouping, set[str]]] = {scenario.kind: (by_tenant, {t.name for t in scenario.tenants})}
    if any(tenant.jobs for tenant in scenario.tenants):
        groupings[f"{scenario.kind}-each"] = (by_job, {life.id for life in recording.lives})
    truth = true_seconds(recording)
    rows = []
    for name, (grouping, names) in groupings.items():
        true = grouping(recording, truth)
        for method, seconds in SECONDS.items():
            found = errors(true, grouping(recording, seconds(recording)), names)
            row = _row(scenario, name, method, found, len({owner.name for owner in true}), recording)
            rows.append({**row, **(_bounds(recording) if method == OURS else {})})
    return rows


def _bounds(recording: Recording) -> dict[str, Any]:
    """How often the truth lies within the error that the agent gives, how wide that is, and what it leaves over."""
    ticks = container_seconds(recording)
    widths = [1.0 if tick.bound is None else tick.bound for tick in ticks]
    within = [abs(tick.true - tick.said) <= width for tick, width in zip(ticks, widths, strict=True)]
    return {
        "covered_ratio": round(sum(within) / len(ticks), 4) if ticks else None,
        "mean_bound_ratio": round(sum(widths) / len(ticks), 5) if ticks else None,
        "unattributed_error": round(abs(unattributed(recording) - unseen(recording)), 5),
    }


def unseen(recording: Recording) -> float:
    """Share of the window that processes had which are no container's of this run, all devices together."""
    ours = {life.id for life in recording.lives}
    seconds = true_seconds(recording)
    return sum(value for owner, value in seconds.items() if owner.name not in ours) * 1e9 / recording.window_ns


def _row(
    scenario: Scenario, name: str, method: str, found: Errors, containers: int, recording: Recording
) -> dict[str, Any]:
    return {
        "scenario": name,
        "method": method,
        "mean_abs_error": round(found.mean_abs, 5),
        "worst_container_error": round(found.worst, 5),
        "seed": scenario.seed,
        "containers": containers,
        "seconds": round(recording.window_ns / 1e9, 3),
    }


def misses(row: Mapping[str, Any]) -> bool:
    """Whether this is gpuwarden's row and beyond its bound."""
    return row["method"] == OURS and not Errors(row["mean_abs_error"], row["worst_container_error"]).fits


def unattributed(recording: Recording) -> float:
    """Share of the window that the agent attributed to no container, all devices together."""
    parts = [
        (rest.sm_ratio or 0.0) * snapshot.interval_ns
        for snapshot in recording.measured
        for rest in snapshot.unattributed
    ]
    return sum(parts) / recording.window_ns


def strangers(recording: Recording) -> float:
    """Share of the window that the agent gave to containers that are not of this run, all devices together."""
    ours = {life.id for life in recording.lives}
    parts = [
        (usage.sm_ratio or 0.0) * snapshot.interval_ns
        for snapshot in recording.measured
        for row in snapshot.containers
        if row.container.id not in ours
        for usage in row.usage
    ]
    return sum(parts) / recording.window_ns


def leak(recording: Recording) -> float:
    """The most by which containers and the rest missed the device in any snapshot: 0, but for rounding."""
    return max((abs(gap) for snapshot in recording.measured for gap in _gaps(snapshot)), default=0.0)


def _gaps(snapshot: Snapshot) -> Iterable[float]:
    for reading in snapshot.devices:
        if reading.sm_activity_ratio is not None:
            uuid = reading.device.uuid
            usage = [u.sm_ratio for row in snapshot.containers for u in row.usage if u.device == uuid]
            rest = [u.sm_ratio for u in snapshot.unattributed if u.device == uuid]
            yield sum(ratio or 0.0 for ratio in (*usage, *rest)) - reading.sm_activity_ratio
