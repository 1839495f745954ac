# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The last hour of every container, in memory: written by the deciding thread, read by threads that answer queries.

Bounded by `MOST_CONTAINERS`: the one that was updated longest ago is dropped first. It outlives a reloaded policy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from agent.core.clock import monotonic_ns, wall_ns
from agent.core.text import quantile
from enforce.audit.decision_log import DecisionRecord, plain
from enforce.audit.intervals import KEPT_NS, Track, TrackItem, thinned
from enforce.audit.model import (
    VERSION,
    ContainerHistory,
    ContainerInfo,
    DecisionEffect,
    DecisionReason,
    Explanation,
    OfflineInterval,
    OnlineInterval,
    Ruler,
    SecondQuantile,
    SlowedContainer,
)
from enforce.memory.accounts import MemoryDecision
from enforce.model import Reading
from enforce.policy.model import OnlineRule

MOST_CONTAINERS = 256  # of each role
MOST_FOR_MEMORY = 50
S = TypeVar("S", bound=TrackItem)


class DecisionHistory:
    """Times given to it are CLOCK_MONOTONIC; `explain` answers in CLOCK_REALTIME."""

    def __init__(
        self, now: Callable[[], tuple[int, int]] = lambda: (monotonic_ns(), wall_ns() - monotonic_ns())
    ) -> None:
        """`now`: the time, and what has to be added to get CLOCK_REALTIME."""
        self._now = now
        self._mutex = threading.Lock()
        self._offline: OrderedDict[str, Track[OfflineInterval]] = OrderedDict()
        self._online: OrderedDict[str, Track[OnlineInterval]] = OrderedDict()
        self._containers: dict[str, tuple[ContainerInfo, int]] = {}  # and when it was last seen
        self._began_ns: int | None = None
        self.for_memory: deque[MemoryDecision] = deque(maxlen=MOST_FOR_MEMORY)  # the latest last
        self.crowded_out = 0
        self.has_policy = self.enforcing = False

    def set_policy(self, has_policy: bool, enforcing: bool) -> None:
        """Whether there is a policy, and whether it is enforced."""
        self.has_policy, self.enforcing = has_policy, enforcing

    def update_containers(self, present: Iterable[ContainerInfo], now_ns: int) -> None:
        """The containers that there are now. One that is gone is kept for as long as it has intervals."""
        with self._mutex:
            self._began_ns = now_ns if self._began_ns is None else self._began_ns
            for info in present:
                self._containers[info.key] = (info, now_ns)
            known = self._offline.keys() | self._online.keys()
            self._containers = {
                key: (info, at)
                for key, (info, at) in self._containers.items()
                if at == now_ns or (key in known and now_ns - at <= KEPT_NS)
            }
            for key in [key for key in known if key not in self._containers]:
                self._offline.pop(key, None)
                self._online.pop(key, None)

    def record_decision(self, decision: DecisionRecord, now_ns: int) -> None:
        """One decision about an offline container."""
        with self._mutex:
            track = self._track(self._offline, decision.container)
            reason, ruled_by = plain(decision.reason), _ruled_by(decision)
            mark = (reason, decision.rungs, decision.target_ns)
            track.extend(now_ns)
            before = track.totals
            if before is not None and track.intervals:  # what it was paused since belongs to what was in force
                track.intervals[-1].pauses += max(0, decision.pauses - before[0])
                track.intervals[-1].paused_seconds += max(0.0, decision.paused_seconds - before[1])
            track.totals = (decision.pauses, decision.paused_seconds)
            if (last := track.current(mark, now_ns)) is not None and last.kind == _kind(decision):
                known, ruler = last.reasons.get(reason), last.whom.get(ruled_by)
                if known is not None and ruler is not None and last.troubles == decision.troubles:
                    known.text, track.parts = decision.reason, (reason, ruled_by)
                    last.repeat(decision.share_after, decision.max_queued_ns, ruler, decision.latency_ns)
                    return
            track.add(_interval(decision, reason, now_ns), mark, (reason, ruled_by), now_ns)

    def record_reading(self, key: str, rule: OnlineRule, reading: Reading | None, now_ns: int) -> None:
        """One reading of an online container."""
        slo, latency, also = rule.slo, None if reading is None else reading.latency_ns, None
        if slo.also is not None:
            also_ns = None if reading is None or reading.also is None else reading.also.latency_ns
            also = SecondQuantile(slo.also.quantile, slo.also.target_ns, also_ns, also_ns)
        part = OnlineInterval(now_ns, now_ns, rule.name, slo.signal, slo.quantile, slo.target_ns, also=also)
        self._add_online(key, part, latency)

    def record_ruler(self, decision: DecisionRecord, now_ns: int) -> None:
        """The same for the ruler of a decision, of which a decision log holds less."""
        first, second = decision.by_quantile()
        also = None
        if second is not None:
            also = SecondQuantile(second.quantile, second.target_ns, second.latency_ns, second.latency_ns)
        part = OnlineInterval(now_ns, now_ns, "", "", first.quantile, first.target_ns, also=also)
        self._add_online(decision.ruler, part, first.latency_ns)

    def _add_online(self, key: str, part: OnlineInterval, latency_ns: float | None) -> None:
        part.latency_low_ns = part.latency_high_ns = latency_ns
        state = part.state()
        with self._mutex:
            self._track(self._online, key).add(part, state, (state,), part.since_ns)

    def end(self, began_ns: int, now_ns: int) -> None:
        """For a log: its first line is of `began_ns`, and its last decisions are still in force."""
        with self._mutex:
            self._began_ns = began_ns
            for offline in self._offline.values():
                offline.extend(now_ns)
            for online in self._online.values():
                online.extend(now_ns)

    def record_effect(self, container: str, effect: DecisionEffect) -> None:
        """The effect of an earlier decision about an offline container."""
        with self._mutex:
            track = self._offline.get(container)
            interval = track.at(effect.decided_ns) if track is not None else None
            if interval is not None and (interval.brought is None or interval.brought.decided_ns <= effect.decided_ns):
                interval.brought = effect

    def recent_intervals(self, most: int) -> list[tuple[ContainerInfo, OfflineInterval]]:
        """The last hour of all offline containers in `most` intervals each, the newest first."""
        now, offset = self._now()
        with self._mutex:
            known = [(key, seen[0]) for key in self._offline if (seen := self._containers.get(key)) is not None]
        found: list[tuple[ContainerInfo, OfflineInterval]] = []
        for key, info in known:
            with self._mutex:  # for one copy at a time: the deciding thread waits for it
                intervals = [_copy(one, offset) for one in _recent(self._offline.get(key), now)]
            found += [(info, one) for one in thinned(intervals, now + offset, most)]
        return sorted(found, key=lambda entry: entry[1].since_ns, reverse=True)

    def names(self) -> dict[str, str]:
        """Names of all containers that are kept, by key."""
        with self._mutex:
            return {key: info.name for key, (info, _) in self._containers.items()}

    def explain(self, key: str | None = None) -> Explanation:
        """All containers, and the history of one; None for an unknown key."""
        now, offset = self._now()
        with self._mutex:
            lost = {"containers": self.crowded_out, "intervals": sum(t.forgotten for t in self._offline.values())}
            return Explanation(
                version=VERSION,
                wall_ns=now + offset,
                since_wall_ns=None if self._began_ns is None else max(self._began_ns, now - KEPT_NS) + offset,
                has_policy=self.has_policy,
                enforcing=self.enforcing,
                containers=tuple(info for info, _ in self._containers.values()),
                story=None if key is None else self._story(key, now, offset),
                forgotten={name: count for name, count in lost.items() if count},
            )

    def _story(self, key: str, now_ns: int, offset_ns: int) -> ContainerHistory | None:
        seen = self._containers.get(key)
        if seen is None:
            return None
        offline, online = self._offline.get(key), self._online.get(key)
        return ContainerHistory(
            seen[0],
            tuple(_copy(one, offset_ns) for one in _recent(offline, now_ns)),
            tuple(_shifted(one, offset_ns) for one in _recent(online, now_ns)),
            tuple(self._slowed_for(key, now_ns)) if online is not None else (),
        )

    def _slowed_for(self, ruler: str, now_ns: int) -> Iterable[SlowedContainer]:
        for key, track in self._offline.items():
            held = [one for one in _recent(track, now_ns) if any(by.key == ruler for by in one.whom.values())]
            if held and key in self._containers:
                yield SlowedContainer(
                    key,
                    self._containers[key][0].name,
                    sum(by.seconds for one in held for by in one.whom.values() if by.key == ruler),
                    min(one.share_low for one in held),
                    sum(one.paused_seconds for one in held),
                )

    def _track(self, tracks: OrderedDict[str, Track[S]], key: str) -> Track[S]:
        track = tracks.get(key)
        if track is None:
            track = tracks[key] = Track()
            while len(tracks) > MOST_CONTAINERS:
                tracks.popitem(last=False)
                self.crowded_out += 1
        tracks.move_to_end(key)
        return track


def _kind(decision: DecisionRecord) -> tuple[object, ...]:
    return (decision.acted, decision.rule, decision.law)


def _ruled_by(decision: DecisionRecord) -> str:
    """The ruler, and its quantile where that is the SLO's second one."""
    is_second = decision.other is not None and decision.other.quantile > decision.quantile
    return f"{decision.ruler} {quantile(decision.quantile)}" if is_second else decision.ruler


def _interval(decision: DecisionRecord, reason: str, now_ns: int) -> OfflineInterval:
    return OfflineInterval(
        since_ns=now_ns,
        until_ns=now_ns,
        acted=decision.acted,
        rule=decision.rule,
        law=decision.law,
        share_low=decision.share_after,
        share_high=decision.share_after,
        queued_low_ns=decision.max_queued_ns,
        queued_high_ns=decision.max_queued_ns,
        means=decision.rungs,
        reasons={reason: DecisionReason(decision.reason)},
        whom={}
        if not decision.ruler
        else {
            _ruled_by(decision): Ruler(
                decision.ruler,
                decision.ruler_name,
                decision.device,
                decision.quantile,
                decision.target_ns,
                latency_ns=decision.latency_ns,
            )
        },
        troubles=dict(decision.troubles),
    )


def _recent(track: Track[S] | None, now_ns: int) -> list[S]:
    return [] if track is None else [one for one in track.intervals if one.until_ns >= now_ns - KEPT_NS]


def _copy(one: OfflineInterval, offset_ns: int) -> OfflineInterval:
    """A copy that is no longer written, in CLOCK_REALTIME."""
    return replace(
        _shifted(one, offset_ns),
        reasons={name: replace(reason) for name, reason in one.reasons.items()},
        whom={name: replace(ruler) for name, ruler in one.whom.items()},
        troubles=dict(one.troubles),
        brought=None if one.brought is None else replace(one.brought, decided_ns=one.brought.decided_ns + offset_ns),
    )


K = TypeVar("K", OfflineInterval, OnlineInterval)


def _shifted(one: K, offset_ns: int) -> K:
    return replace(one, since_ns=one.since_ns + offset_ns, until_ns=one.until_ns + offset_ns)
