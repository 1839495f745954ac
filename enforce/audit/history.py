# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The last hour of every container, in memory: written by the deciding thread, read by whoever answers questions.

Bounded by `MOST_CONTAINERS`; the one that was heard of longest ago gives way. It outlives a reloaded policy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from agent.clock import monotonic_ns, wall_ns
from enforce.decisions import Decision, plain
from enforce.explain.model import VERSION, Brought, Explanation, Interval, Kept, Slowed, Story, Who, Whom, Why
from enforce.explain.track import KEPT_NS, Stretch, Track, thinned
from enforce.memory.told import MemoryDecision
from enforce.model import Reading
from enforce.policy.model import OnlineRule

MOST_CONTAINERS = 256  # of each role
MOST_FOR_MEMORY = 50
S = TypeVar("S", bound=Stretch)


class History:
    """Times given to it are CLOCK_MONOTONIC; `explain` answers in CLOCK_REALTIME."""

    def __init__(
        self, now: Callable[[], tuple[int, int]] = lambda: (monotonic_ns(), wall_ns() - monotonic_ns())
    ) -> None:
        """`now`: the time, and what has to be added to get CLOCK_REALTIME."""
        self._now = now
        self._mutex = threading.Lock()
        self._offline: OrderedDict[str, Track[Interval]] = OrderedDict()
        self._online: OrderedDict[str, Track[Kept]] = OrderedDict()
        self._who: dict[str, tuple[Who, int]] = {}  # and when it was last seen
        self._began_ns: int | None = None
        self.for_memory: deque[MemoryDecision] = deque(maxlen=MOST_FOR_MEMORY)  # the latest last
        self.crowded_out = 0
        self.has_policy = self.enforcing = False

    def see(self, everybody: Iterable[Who], now_ns: int) -> None:
        """Who there is now. Those that are gone are remembered for as long as there is something to say."""
        with self._mutex:
            self._began_ns = now_ns if self._began_ns is None else self._began_ns
            for who in everybody:
                self._who[who.key] = (who, now_ns)
            known = self._offline.keys() | self._online.keys()
            self._who = {
                key: (who, at)
                for key, (who, at) in self._who.items()
                if at == now_ns or (key in known and now_ns - at <= KEPT_NS)
            }
            for key in [key for key in known if key not in self._who]:
                self._offline.pop(key, None)
                self._online.pop(key, None)

    def decided(self, decision: Decision, now_ns: int) -> None:
        """One decision about an offline container."""
        with self._mutex:
            track = self._track(self._offline, decision.container)
            reason = plain(decision.reason)
            mark = (reason, decision.rungs, decision.target_ns)
            track.reach(now_ns)
            before = track.totals
            if before is not None and track.intervals:  # what it was paused since belongs to what was in force
                track.intervals[-1].pauses += max(0, decision.pauses - before[0])
                track.intervals[-1].paused_seconds += max(0.0, decision.paused_seconds - before[1])
            track.totals = (decision.pauses, decision.paused_seconds)
            if (last := track.going_on(mark, now_ns)) is not None and last.kind == _kind(decision):
                why, whom = last.reasons.get(reason), last.whom.get(decision.ruler)
                if why is not None and whom is not None and last.troubles == decision.troubles:
                    why.text, track.parts = decision.reason, (reason, decision.ruler)
                    last.again(decision.share_after, decision.max_queued_ns, whom, decision.latency_ns)
                    return
            track.add(_interval(decision, reason, now_ns), mark, (reason, decision.ruler), now_ns)

    def promised(self, key: str, rule: OnlineRule, reading: Reading | None, now_ns: int) -> None:
        """One reading of an online container."""
        slo, latency = rule.slo, None if reading is None else reading.latency_ns
        self._promise(key, Kept(now_ns, now_ns, rule.name, slo.signal, slo.quantile, slo.target_ns), latency)

    def ruled(self, decision: Decision, now_ns: int) -> None:
        """The same, as far as a decision about an offline container tells it."""
        part = Kept(now_ns, now_ns, "", "", decision.quantile, decision.target_ns)
        self._promise(decision.ruler, part, decision.latency_ns)

    def _promise(self, key: str, part: Kept, latency_ns: float | None) -> None:
        state = "unknown" if latency_ns is None else "missed" if latency_ns > part.target_ns else "kept"
        part.latency_low_ns = part.latency_high_ns = latency_ns
        with self._mutex:
            self._track(self._online, key).add(part, state, (state,), part.since_ns)

    def end(self, began_ns: int, now_ns: int) -> None:
        """For a log: its first line is of `began_ns`, and what its last lines say still holds."""
        with self._mutex:
            self._began_ns = began_ns
            for offline in self._offline.values():
                offline.reach(now_ns)
            for online in self._online.values():
                online.reach(now_ns)

    def brought(self, container: str, what: Brought) -> None:
        """What an earlier decision about an offline container brought."""
        with self._mutex:
            track = self._offline.get(container)
            interval = track.at(what.decided_ns) if track is not None else None
            if interval is not None and (interval.brought is None or interval.brought.decided_ns <= what.decided_ns):
                interval.brought = what

    def outlines(self, most: int) -> list[tuple[Who, Interval]]:
        """Everybody's last hour in `most` intervals each, the newest first."""
        now, offset = self._now()
        with self._mutex:
            known = [(key, seen[0]) for key in self._offline if (seen := self._who.get(key)) is not None]
        found: list[tuple[Who, Interval]] = []
        for key, who in known:
            with self._mutex:  # for one copy at a time: the deciding thread waits for it
                intervals = [_told(one, offset) for one in _recent(self._offline.get(key), now)]
            found += [(who, one) for one in thinned(intervals, now + offset, most)]
        return sorted(found, key=lambda entry: entry[1].since_ns, reverse=True)

    def names(self) -> dict[str, str]:
        """Of every container that is remembered, by key."""
        with self._mutex:
            return {key: who.name for key, (who, _) in self._who.items()}

    def explain(self, key: str | None = None) -> Explanation:
        """Everybody, and the story of one. An unknown key has none."""
        now, offset = self._now()
        with self._mutex:
            lost = {"containers": self.crowded_out, "intervals": sum(t.forgotten for t in self._offline.values())}
            return Explanation(
                version=VERSION,
                wall_ns=now + offset,
                since_wall_ns=None if self._began_ns is None else max(self._began_ns, now - KEPT_NS) + offset,
                has_policy=self.has_policy,
                enforcing=self.enforcing,
                containers=tuple(who for who, _ in self._who.values()),
                story=None if key is None else self._story(key, now, offset),
                forgotten={name: count for name, count in lost.items() if count},
            )

    def _story(self, key: str, now_ns: int, offset_ns: int) -> Story | None:
        seen = self._who.get(key)
        if seen is None:
            return None
        offline, online = self._offline.get(key), self._online.get(key)
        return Story(
            seen[0],
            tuple(_told(one, offset_ns) for one in _recent(offline, now_ns)),
            tuple(_moved(one, offset_ns) for one in _recent(online, now_ns)),
            tuple(self._slowed_for(key, now_ns)) if online is not None else (),
        )

    def _slowed_for(self, ruler: str, now_ns: int) -> Iterable[Slowed]:
        for key, track in self._offline.items():
            held = [one for one in _recent(track, now_ns) if ruler in one.whom]
            if held and key in self._who:
                yield Slowed(
                    key,
                    self._who[key][0].name,
                    sum(one.whom[ruler].seconds for one in held),
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


def _kind(decision: Decision) -> tuple[object, ...]:
    return (decision.acted, decision.rule, decision.law)


def _interval(decision: Decision, reason: str, now_ns: int) -> Interval:
    return Interval(
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
        reasons={reason: Why(decision.reason)},
        whom={}
        if not decision.ruler
        else {
            decision.ruler: Whom(
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


def _told(one: Interval, offset_ns: int) -> Interval:
    """A copy that nobody writes any more."""
    return replace(
        _moved(one, offset_ns),
        reasons={name: replace(why) for name, why in one.reasons.items()},
        whom={name: replace(whom) for name, whom in one.whom.items()},
        troubles=dict(one.troubles),
        brought=None if one.brought is None else replace(one.brought, decided_ns=one.brought.decided_ns + offset_ns),
    )


K = TypeVar("K", Interval, Kept)


def _moved(one: K, offset_ns: int) -> K:
    return replace(one, since_ns=one.since_ns + offset_ns, until_ns=one.until_ns + offset_ns)
