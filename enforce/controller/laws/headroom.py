# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`headroom`: spend the SLO's slack on offline work, and no more.

What an online request waits for is what offline work has queued on the device when it arrives, and one kernel. A
request that queues behind it waits for that too, the longer the busier the online side is: by 1 ÷ (1 − its load). So
the first lever is the bound of that queue, `max_queued`: it grows by a part of the slack that is certain and never
beyond the slack, times 1 − load, nor a tenth of the target: bursts come unannounced. The second, for when the shortest
queue is too long, is the share of time. Both move down at once and up slowly (senpai), not at all within the dead band
and not while the online side keeps the device busy (Heracles: no growth above 85 % load); after a step down the law
waits until it has readings from after the step. The share is cut at once for a miss that is certain, for any other when
it has lasted; a share that was too large is tried again later each time. Where the target allows a long queue, the gate
is soft: what fits is queued while a request runs, so that the device is not idle between its end and the offline side's
next launch.

Slowing may not help: the latency can be the online side's own. Then the share is given back and tried again later,
each time after twice as long. The bound is kept per device by the pace actuator from delivery-rate estimates, as BBR
keeps a path's queue short.

An SLO with two quantiles is judged by each, with the same levers, and what leaves offline work less is done. The
lesser slack of the two would not do: what may be queued is slack in time, and the target with more may be the shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from enforce.model import OnlineOn, Reading, Share
from enforce.policy.model import OfflineRule, Tuning

SECOND_NS = 1_000_000_000
START_QUEUED_NS = 800_000
MIN_QUEUED_NS = 500_000  # below this a stop costs more than it saves: a stop and resume take about 0.15 ms
TOP_QUEUED_NS = 8_000_000
SOFT_QUEUED_NS, HARD_QUEUED_NS = 2_500_000, 2_000_000  # from … and down to: the gate lets what fits be queued
SPENT_PER_SECOND = 0.25  # of the certain slack, times 1 − load
GROWN_PER_SECOND_NS = 500_000  # at most: what has been read so far may hold no burst yet
SPENT_AT_MOST = 1.0  # likewise: as the slack shrinks by what is queued, half of what there was is spent
MOST_OF_TARGET = 0.1  # of the target: an unforeseen burst waits for what is queued when it begins
TOO_LONG, EASED = 1.5, 0.98  # beyond so much of that it is shortened by so much a decision
FAR_SLACK = -0.25  # a miss beyond that ends in the shortest queue at once
GROW_SLACK = 0.08  # less than this: no growth
KEPT_SLACK = 0.03  # and less than this: a shorter queue, before the target is missed
BUSY_RATIO = 0.85  # no growth above
HOLD_NS = SECOND_NS  # after a step down, or as long as the reading remembers, if that is longer
QUEUE_TRIM, QUEUE_CUT = 0.9, 0.5
SHARE_GROWTH, SHARE_CUT = 0.05, 0.7
BELOW_CEILING = 0.9  # of the share that was too much: no more is given again before its time
FIRST_CEILING_NS, LONGEST_CEILING_NS = 20 * SECOND_NS, 640 * SECOND_NS
EXHAUSTED_NS = 3 * SECOND_NS  # a miss at the floor that lasts so long: the ladder's next rung
FUTILE_NS = 10 * SECOND_NS  # … and so long without help: given back
HELPED = 0.9  # of the latency before: less is help
WORSE = 1.25  # of the latency for which slowing was given up: more is another trouble
FIRST_BACKOFF_NS, LONGEST_BACKOFF_NS = 30 * SECOND_NS, 1800 * SECOND_NS


@dataclass(frozen=True, slots=True)
class Miss:
    """A miss of the target with the shortest queue. `latency_ns`: as it began, before the share was cut."""

    since_ns: int
    latency_ns: float
    floor_since_ns: int | None = None  # missed at the floor; None: the share is above it
    watched_until_ns: int = 0  # before, only a certain miss cuts the share; 0: it was cut


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Slowing did not help `latency_ns`, so it is not tried again before `until_ns`; the next time for longer."""

    until_ns: int = 0
    latency_ns: float = 0.0
    backoff_ns: int = FIRST_BACKOFF_NS  # of the next time


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The share that was last too much, so that it is not tried again before `until_ns`; the next time for longer."""

    ratio: float = 1.0
    until_ns: int = 0
    this_ns: int = 0  # how long it is kept
    next_ns: int = FIRST_CEILING_NS  # … the next time


@dataclass(frozen=True, slots=True)
class Misses:
    """Of one quantile: the miss that lasts, the one that slowing did not help, and the share that was too much."""

    miss: Miss | None = None
    give_up: GiveUp = GiveUp()
    ceiling: Ceiling = Ceiling()


@dataclass(frozen=True, slots=True)
class HeadroomState:
    """The two levers, and when each may move again. Times are of the decisions; None: does not hold now.

    Levers and times are the same for both quantiles of an SLO, as both see what one of them had done.
    """

    ratio: float
    max_queued_ns: float
    soft: bool = False
    remembers_ns: int = HOLD_NS  # how far back the last reading reached: as long a step down is waited for
    at_ns: int | None = None
    hold_until_ns: int = 0
    trimmed_until_ns: int = 0  # no further trim and no growth before; a miss does not wait for it
    grow_share_ns: int = 0
    last_reading_ns: int | None = None
    misses: Misses = Misses()
    also: Misses = Misses()  # of the SLO's second quantile


@dataclass(frozen=True, slots=True)
class Headroom:
    """The law with one rule's limits."""

    floor_ratio: float
    top_queued_ns: float
    no_data_hold_ns: int
    name: ClassVar[str] = "headroom"

    @classmethod
    def of(cls, rule: OfflineRule, tuning: Tuning) -> Headroom:
        """With the rule's floor and upper bound of the queue."""
        return cls(rule.limits.floor_ratio, rule.limits.max_queued_ns or TOP_QUEUED_NS, tuning.no_data_hold_ns)

    @property
    def shortest_ns(self) -> float:
        """The shortest queue."""
        return min(MIN_QUEUED_NS, self.top_queued_ns)

    def start(self) -> HeadroomState:
        """Everything allowed, with a short queue: protection before the first reading."""
        return HeadroomState(1.0, min(START_QUEUED_NS, self.top_queued_ns))

    def step(self, state: HeadroomState, online: OnlineOn, now_ns: int) -> tuple[HeadroomState, Share]:
        """One decision: of an SLO with two quantiles the stricter one's, each judged by itself."""
        first, *second = online.by_quantile()
        one, share = self._decide(state, first, now_ns)
        if not second:
            return one, replace(share, quantile=first.slo.quantile)
        other, other_share = self._decide(replace(state, misses=state.also), second[0], now_ns)
        judged = [(one, share, first), (other, other_share, second[0])]
        binding = [each for each in judged if not _is_given_up(each[0], each[2], now_ns)] or judged
        return _stricter(binding, replace(one, also=other.misses))

    def _decide(self, state: HeadroomState, online: OnlineOn, now_ns: int) -> tuple[HeadroomState, Share]:
        reading, slo = online.reading, online.slo
        if reading is None:
            return self._without_data(state, now_ns)
        elapsed_ns = 0 if state.at_ns is None else max(0, now_ns - state.at_ns)
        remembers_ns = max(HOLD_NS, reading.recent_span_ns if reading.recent_ns is not None else slo.window_ns)
        state = replace(state, at_ns=now_ns, last_reading_ns=now_ns, remembers_ns=remembers_ns)
        # The long window remembers what is already mended: only what is recent may cause another step down.
        recent = reading.judged_ns
        low = _low_ns(reading)
        if recent is None or low is None:
            return self._answer(state, "too few requests to judge")
        if _is_given_up(state, online, now_ns):
            return self._answer(state, f"target missed by {-slo.slack_ratio(recent):.0%}: slowing did not help")
        if now_ns < state.hold_until_ns:
            return self._answer(state, "holding after a step down", self._is_exhausted(state, now_ns))
        certain = low > slo.target_ns and (reading.certain_ns or 0.0) > slo.target_ns
        miss = state.misses.miss
        if miss is not None and now_ns < miss.watched_until_ns and not certain:
            return self._answer(state, "watching whether the miss lasts")
        if low > slo.target_ns:
            return self._step_down(state, now_ns, low, slo.slack_ratio(recent), certain)
        state = replace(state, misses=replace(state.misses, miss=None))
        return self._keep(state, online, recent, now_ns, elapsed_ns)

    def _keep(
        self, state: HeadroomState, online: OnlineOn, recent_ns: float, now_ns: int, elapsed_ns: int
    ) -> tuple[HeadroomState, Share]:
        """The target is kept, so far."""
        slo, whole = online.slo, online.reading.latency_ns if online.reading else None
        if now_ns < state.trimmed_until_ns:
            return self._answer(state, f"slack {slo.slack_ratio(recent_ns):.1%}: holding after a shorter queue")
        if slo.slack_ratio(recent_ns) < KEPT_SLACK:
            return self._trim(state, now_ns, slo.slack_ratio(recent_ns))
        slack = slo.slack_ratio(max(recent_ns, whole or 0.0))
        if slack < 0:
            return self._answer(state, "back within the target, but the window still has the miss in it")
        if slack < GROW_SLACK:
            return self._answer(state, f"slack {slack:.0%}: within the dead band")
        busy = online.busy_ratio or 0.0
        if busy > BUSY_RATIO:
            return self._answer(state, f"slack {slack:.0%}, but the online side keeps the device busy: no growth")
        return self._grow(state, now_ns, slack, min(slack * (1 - busy), MOST_OF_TARGET) * slo.target_ns, elapsed_ns)

    def _without_data(self, state: HeadroomState, now_ns: int) -> tuple[HeadroomState, Share]:
        """Hold, then release: an online side without requests has nothing to protect, but may come back."""
        if state.last_reading_ns is not None and now_ns - state.last_reading_ns < self.no_data_hold_ns:
            return self._answer(replace(state, at_ns=now_ns), "no reading: holding")
        start = self.start()
        return start, Share(start.ratio, int(start.max_queued_ns), "no online requests: released")

    def _step_down(
        self, state: HeadroomState, now_ns: int, low_ns: float, slack: float, certain: bool
    ) -> tuple[HeadroomState, Share]:
        remembers_ns = state.remembers_ns
        held = replace(state, hold_until_ns=now_ns + remembers_ns, grow_share_ns=now_ns + 2 * remembers_ns)
        missed = f"target missed by {-slack:.0%}"
        if state.max_queued_ns > self.shortest_ns:
            cut = QUEUE_CUT if slack > FAR_SLACK else 0.0  # far off, a queue behind the queue has built up
            queued = max(self.shortest_ns, state.max_queued_ns * cut)
            return self._answer(replace(held, max_queued_ns=queued), f"{missed}: shorter queue")
        misses = state.misses
        if misses.miss is None and not certain:  # a second of noise is no reason: the queue is as short as can be
            watched = replace(misses, miss=Miss(now_ns, low_ns, watched_until_ns=now_ns + remembers_ns))
            return self._answer(replace(state, misses=watched), f"{missed}: watching whether it lasts")
        miss = replace(misses.miss or Miss(now_ns, low_ns), watched_until_ns=0)
        if state.ratio > self.floor_ratio:
            ratio = max(self.floor_ratio, state.ratio * SHARE_CUT)
            misses = replace(misses, miss=miss, ceiling=_ceiling(misses, state.ratio, now_ns))
            return self._answer(replace(held, ratio=ratio, misses=misses), f"{missed}: smaller share")
        return self._at_floor(held, miss, now_ns, low_ns, missed)

    def _at_floor(
        self, state: HeadroomState, miss: Miss, now_ns: int, low_ns: float, missed: str
    ) -> tuple[HeadroomState, Share]:
        since = miss.floor_since_ns if miss.floor_since_ns is not None else now_ns
        state = replace(state, misses=replace(state.misses, miss=replace(miss, floor_since_ns=since)))
        if now_ns - since < max(FUTILE_NS, 3 * state.remembers_ns) or low_ns < HELPED * miss.latency_ns:
            return self._answer(state, f"{missed}: at the floor", self._is_exhausted(state, now_ns))
        backoff_ns = state.misses.give_up.backoff_ns
        give_up = GiveUp(now_ns + backoff_ns, max(low_ns, miss.latency_ns), min(LONGEST_BACKOFF_NS, 2 * backoff_ns))
        state = replace(self.start(), at_ns=now_ns, last_reading_ns=now_ns, misses=Misses(give_up=give_up))
        return self._answer(state, f"{missed}: slowing does not help, given back for {backoff_ns / 1e9:.0f} s")

    def _is_exhausted(self, state: HeadroomState, now_ns: int) -> bool:
        lasting_ns = max(EXHAUSTED_NS, state.remembers_ns)
        miss = state.misses.miss
        floor_since_ns = miss.floor_since_ns if miss else None
        return floor_since_ns is not None and now_ns - floor_since_ns >= lasting_ns

    def _trim(self, state: HeadroomState, now_ns: int, slack: float) -> tuple[HeadroomState, Share]:
        queued = max(self.shortest_ns, state.max_queued_ns * QUEUE_TRIM)
        trimmed = replace(state, max_queued_ns=queued, trimmed_until_ns=now_ns + state.remembers_ns // 4)
        return self._answer(trimmed, f"slack {slack:.1%}: a shorter queue")

    def _grow(
        self, state: HeadroomState, now_ns: int, slack: float, spendable_ns: float, elapsed_ns: int
    ) -> tuple[HeadroomState, Share]:
        if state.ratio < 1.0:
            if now_ns < state.grow_share_ns:
                return self._answer(state, f"slack {slack:.0%}: waiting to grow")
            ratio = min(1.0, state.ratio + SHARE_GROWTH)
            ceiling = state.misses.ceiling
            if now_ns < ceiling.until_ns and ratio > BELOW_CEILING * ceiling.ratio:
                return self._answer(state, f"slack {slack:.0%}: a larger share was too much")
            grown = replace(state, ratio=ratio, grow_share_ns=now_ns + SECOND_NS)
            return self._answer(grown, f"slack {slack:.0%}: larger share")
        most_ns = min(self.top_queued_ns, max(self.shortest_ns, SPENT_AT_MOST * spendable_ns))
        if state.max_queued_ns > TOO_LONG * most_ns:
            eased = replace(state, max_queued_ns=max(most_ns, EASED * state.max_queued_ns))
            return self._answer(eased, f"slack {slack:.0%}: the queue is longer than that allows")
        if state.max_queued_ns >= most_ns:
            return self._answer(state, f"slack {slack:.0%}: the queue is as long as that allows")
        rate_ns = min(GROWN_PER_SECOND_NS, SPENT_PER_SECOND * spendable_ns)
        grown_ns = state.max_queued_ns + rate_ns * elapsed_ns / SECOND_NS
        misses = replace(state.misses, give_up=replace(state.misses.give_up, backoff_ns=FIRST_BACKOFF_NS))
        longer = replace(state, max_queued_ns=min(most_ns, grown_ns), misses=replace(misses, ceiling=Ceiling()))
        return self._answer(longer, f"slack {slack:.0%}: longer queue")

    def _answer(self, state: HeadroomState, reason: str, exhausted: bool = False) -> tuple[HeadroomState, Share]:
        soft = state.max_queued_ns >= (HARD_QUEUED_NS if state.soft else SOFT_QUEUED_NS)
        return replace(state, soft=soft), Share(state.ratio, int(state.max_queued_ns), reason, exhausted, soft)


def _ceiling(misses: Misses, ratio: float, now_ns: int) -> Ceiling:
    """After a cut of the share from `ratio`; of one miss only the first cut doubles the time."""
    is_first = misses.miss is None or misses.miss.watched_until_ns > 0
    this_ns, next_ns = misses.ceiling.this_ns, misses.ceiling.next_ns
    if is_first:
        this_ns, next_ns = next_ns, min(LONGEST_CEILING_NS, 2 * next_ns)
    return Ceiling(ratio, now_ns + this_ns, this_ns, next_ns)


def _low_ns(reading: Reading) -> float | None:
    return reading.recent_low_ns if reading.recent_low_ns is not None else reading.latency_ns


def _is_given_up(state: HeadroomState, online: OnlineOn, now_ns: int) -> bool:
    """Whether the quantile is missed, and slowing did not help that: then it binds nothing."""
    low = _low_ns(online.reading) if online.reading is not None else None
    if low is None or low <= online.slo.target_ns:
        return False
    return now_ns < state.misses.give_up.until_ns and low <= WORSE * state.misses.give_up.latency_ns


def _stricter(
    binding: Sequence[tuple[HeadroomState, Share, OnlineOn]], state: HeadroomState
) -> tuple[HeadroomState, Share]:
    """The least that the binding quantiles leave to offline work, and the latest of their times."""
    states = [one for one, _, _ in binding]
    state = replace(
        state,
        ratio=min(one.ratio for one in states),
        max_queued_ns=min(one.max_queued_ns for one in states),
        soft=all(one.soft for one in states),
        hold_until_ns=max(one.hold_until_ns for one in states),
        trimmed_until_ns=max(one.trimmed_until_ns for one in states),
        grow_share_ns=max(one.grow_share_ns for one in states),
    )
    _, share, online = min(binding, key=_strictness)
    share = replace(share, ratio=state.ratio, max_queued_ns=int(state.max_queued_ns), soft=state.soft)
    return state, replace(share, quantile=online.slo.quantile)


def _strictness(judged: tuple[HeadroomState, Share, OnlineOn]) -> tuple[float, ...]:
    """Less is stricter; of two that leave the same, the one nearer to its target, or further beyond it."""
    _, share, online = judged
    low = _low_ns(online.reading) if online.reading is not None else None
    slack = online.slo.slack_ratio(low) if low is not None else 1.0
    return share.ratio, share.max_queued_ns, not share.exhausted, slack
