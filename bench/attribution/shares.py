# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who had how much of a device: by the truth, and by each method that is compared. Pure.

A share is SM time ÷ time, of one device. `nvml` is smUtil ÷ 100, as monitoring tools show it; `equal_split` is the
device's activity ÷ the containers with a process on it, second by second; `gpuwarden` is what the agent counted.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from agent.core.clock import NS_PER_SECOND
from agent.core.model import ContainerUsage, Snapshot
from bench.attribution.recording import Recording


class Owner(NamedTuple):
    """Whose share: a container (or a kind of jobs) on a device."""

    name: str
    device: str  # its UUID


Shares = Mapping[Owner, float]


def true_seconds(recording: Recording) -> dict[Owner, float]:
    """Seconds of a whole device in the window, by container id."""
    ids = {life.tgid: life.id for life in recording.lives}
    seconds: defaultdict[Owner, float] = defaultdict(float)
    for tgid, device in recording.truth[-1].sm_ns:
        series = [(sample.at_ns, sample.sm_ns.get((tgid, device), 0)) for sample in recording.truth]
        grown = interpolate(series, recording.end_ns) - interpolate(series, recording.begin_ns)
        seconds[Owner(ids.get(tgid, f"process {tgid}"), device)] += grown / NS_PER_SECOND
    return dict(seconds)


def interpolate(series: Sequence[tuple[int, float]], at: int) -> float:
    """Between the two samples around `at`, in a straight line; outside of them the nearest."""
    place = bisect_right(series, at, key=lambda sample: sample[0])
    if place in (0, len(series)):
        return series[min(place, len(series) - 1)][1]
    (before, low), (after, high) = series[place - 1], series[place]
    return low + (high - low) * (at - before) / (after - before)


def gpuwarden_seconds(recording: Recording) -> dict[Owner, float]:
    """The growth of the agent's totals; of a container that is gone, up to the last that was reported."""
    at_begin: dict[Owner, float] = {}
    latest: dict[Owner, float] = {}
    for snapshot in recording.snapshots:
        if snapshot.at_ns > recording.end_ns:
            break
        latest.update(_totals(snapshot))
        if snapshot.at_ns <= recording.begin_ns:
            at_begin = dict(latest)
    return {owner: total - at_begin.get(owner, 0.0) for owner, total in latest.items()}


def _totals(snapshot: Snapshot) -> dict[Owner, float]:
    ended: Sequence[ContainerUsage] = snapshot.ended
    return {
        Owner(row.container.id or row.container.name, usage.device): usage.totals.sm_seconds
        for row in (*ended, *snapshot.containers)
        for usage in row.usage
    }


def nvml_seconds(recording: Recording) -> dict[Owner, float]:
    """smUtil of each look, over the time since the one before."""
    ids = {life.tgid: life.id for life in recording.lives}
    last = recording.measured[-1]
    to_monotonic_ns = last.at_ns - last.wall_ns
    seconds: defaultdict[Owner, float] = defaultdict(float)
    before: dict[str, int] = {}
    for listing in recording.listings:
        newest_us = max((wall_us for wall_us, _, _ in listing.samples), default=0)
        span = min(1.0, (newest_us - before.get(listing.device, 0)) / 1e6)
        for wall_us, tgid, ratio in listing.samples:
            if recording.begin_ns < wall_us * 1000 + to_monotonic_ns <= recording.end_ns:
                seconds[Owner(ids.get(tgid, f"process {tgid}"), listing.device)] += ratio * span
        if listing.samples:
            before[listing.device] = newest_us
    return dict(seconds)


def equal_split_seconds(recording: Recording) -> dict[Owner, float]:
    """Each tick's activity, the same for every container that NVML lists a process of."""
    ids = {life.tgid: life.id for life in recording.lives}
    seconds: defaultdict[Owner, float] = defaultdict(float)
    for snapshot in recording.measured:
        for reading in snapshot.devices:
            device = reading.device.uuid
            here = [listing for listing in recording.listings if listing.device == device]
            nearest = min(here, key=lambda listing: abs(listing.at_ns - snapshot.at_ns), default=None)
            containers = {ids[tgid] for tgid in (nearest.tgids if nearest else ()) if tgid in ids}
            for container in containers:
                active = (reading.sm_activity_ratio or 0.0) * snapshot.interval_ns / NS_PER_SECOND
                seconds[Owner(container, device)] += active / len(containers)
    return dict(seconds)


SECONDS: Final[Mapping[str, Callable[[Recording], dict[Owner, float]]]] = {
    "gpuwarden": gpuwarden_seconds,
    "nvml": nvml_seconds,
    "equal_split": equal_split_seconds,
}


def by_tenant(recording: Recording, seconds: Mapping[Owner, float]) -> dict[Owner, float]:
    """Shares of the window; the containers of one kind of jobs are one."""
    names = {life.id: life.name for life in recording.lives}
    shares: defaultdict[Owner, float] = defaultdict(float)
    for owner, value in seconds.items():
        shares[Owner(names.get(owner.name, owner.name), owner.device)] += value * NS_PER_SECOND / recording.window_ns
    return dict(shares)


class ContainerSecond(NamedTuple):
    """A container's tick on a device: its true share, and what the agent said, with its bound (None: it gave none)."""

    true: float
    said: float
    bound: float | None


def container_seconds(recording: Recording) -> list[ContainerSecond]:
    """All ticks of the window, of each container that the agent gave a share."""
    tgids = {life.id: life.tgid for life in recording.lives}
    series: dict[tuple[int, str], list[tuple[int, float]]] = {}
    for sample in recording.truth:
        for owner, ns in sample.sm_ns.items():
            series.setdefault(owner, []).append((sample.at_ns, ns))
    found = []
    for snapshot in recording.measured:
        for row in snapshot.containers:
            for usage in row.usage:
                if row.container.id in tgids and usage.sm_ratio is not None:
                    own = series.get((tgids[row.container.id], usage.device), [(0, 0.0)])
                    grown = interpolate(own, snapshot.at_ns) - interpolate(own, snapshot.at_ns - snapshot.interval_ns)
                    found.append(ContainerSecond(grown / snapshot.interval_ns, usage.sm_ratio, usage.sm_error_ratio))
    return found


def by_job(recording: Recording, seconds: Mapping[Owner, float]) -> dict[Owner, float]:
    """Shares of the time in which it ran, of each container that came and went inside the window.

    The time is at least a tick: no method knows of anything shorter.
    """
    tick_ns = max(snapshot.interval_ns for snapshot in recording.measured)
    ran_ns = {
        life.id: max(life.end_ns - life.begin_ns, tick_ns)
        for life in recording.lives
        if life.end_ns is not None and recording.begin_ns <= life.begin_ns and life.end_ns + tick_ns <= recording.end_ns
    }
    return {o: value * NS_PER_SECOND / ran_ns[o.name] for o, value in seconds.items() if o.name in ran_ns}
