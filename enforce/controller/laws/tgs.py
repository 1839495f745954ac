# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`tgs`: the law of TGS (Wu et al., NSDI'23), as its published code has it. The baseline to beat.

It watches how many CUDA blocks the production (online) job launches per sample and compares that with the most that it
launched alone; the opportunistic (offline) job gets a budget of blocks per 50 ms, steered as TCP steers its window:
slow start, then congestion avoidance. The latency is not looked at. Constants and steps are those of
github.com/pkusys/TGS, hijack/src/low_priority_hijack_call.c; rates are blocks per 5 s there, and so they are here,
however long a sample is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from enforce.model import OnlineOn, Share
from enforce.policy.model import OfflineRule, Tuning

WINDOW_NS = 50_000_000  # of the budget
RATE_NS = 5_000_000_000  # that rates are over
INITIAL_LIMIT, LEAST_STEP, UNLIMITED = 20_000.0, 1000.0, 2.0**40
THRESHOLD = 0.03
IDLE_RATE = 1000.0
SAMPLES = 5  # of the window, and of a profile
WARM_SAMPLES = 15  # before idleness counts


@dataclass(frozen=True, slots=True)
class TgsState:
    """What the published code keeps between samples. `limit` is blocks per WINDOW_NS; rates are blocks per RATE_NS."""

    sampled_ns: int | None = None
    blocks: int = 0
    rates: tuple[float, ...] = (0.0,) * SAMPLES  # the newest first
    most: float = 0.0  # believed to be launched alone
    limit: float = 0.0
    profiled: int = 0  # samples of the profile that were taken
    again: bool = False  # the profile goes on
    controlled: int = 0  # samples since the first profile
    slow_start: bool = True
    falling: bool = False
    worse: int = 0  # samples in a row that were far off

    @property
    def ratio(self) -> float:
        """As a share for people: 1 while unlimited."""
        return 1.0 if self.limit >= UNLIMITED else 0.0


@dataclass(frozen=True, slots=True)
class Tgs:
    """The law with one sample's length."""

    sample_ns: int
    name: ClassVar[str] = "tgs"

    @classmethod
    def of(cls, _rule: OfflineRule, tuning: Tuning) -> Self:
        """TGS knows neither floor nor target; the floor is kept by the actuator all the same."""
        return cls(tuning.tgs_sample_ns)

    def start(self) -> TgsState:
        """The production job has just arrived: nothing is let through while it is profiled."""
        return TgsState()

    def step(self, state: TgsState, online: OnlineOn, now_ns: int) -> tuple[TgsState, Share]:
        """One decision; the state changes once a sample."""
        if online.blocks_total is None:
            return state, Share(1.0, 0, "the online side's launches are not known: not limited", blocks=int(UNLIMITED))
        if state.sampled_ns is None or online.blocks_total < state.blocks:
            state = replace(state, sampled_ns=now_ns, blocks=online.blocks_total)
        elapsed_ns = now_ns - (state.sampled_ns or 0)
        if elapsed_ns >= self.sample_ns:
            rate = max(1.0, (online.blocks_total - state.blocks) * RATE_NS / elapsed_ns)
            state = replace(_sampled(state, rate), sampled_ns=now_ns, blocks=online.blocks_total)
        return state, _share(state)


def _share(state: TgsState) -> Share:
    if state.limit >= UNLIMITED:
        return Share(1.0, 0, "tgs: production is idle, or not disturbed: not limited", blocks=int(UNLIMITED))
    what = "profiling" if state.controlled == 0 else "slow start" if state.slow_start else "congestion avoidance"
    blocks = int(state.limit)
    return Share(0.0, 0, f"tgs: {what}, {blocks} blocks in 50 ms", blocks=blocks)


def _sampled(state: TgsState, rate: float) -> TgsState:
    peak = max((a + b) / 2 for a, b in zip(state.rates, state.rates[1:], strict=False))
    off = (peak - state.most) / state.most if state.most else float("inf")
    state = replace(state, rates=(rate, *state.rates[:-1]))
    if state.profiled < SAMPLES or state.again:
        return _profiled(state, peak, off)
    if abs(off) > 0.2:  # production is another than it was: profile it anew, at the limit that there is
        return replace(state, most=_adjusted(state.most, peak, off), profiled=0, again=False)
    if abs(off) <= 0.1:
        state = replace(state, most=max(state.most, peak))
    return _controlled(replace(state, controlled=state.controlled + 1), rate)


def _profiled(state: TgsState, peak: float, off: float) -> TgsState:
    taken = replace(state, profiled=state.profiled + 1)
    if abs(off) <= 0.05:
        most = max(state.most, peak)
        return replace(taken, most=most, again=abs(most - peak) < 1e-5)
    return replace(taken, most=_adjusted(state.most, peak, off), again=True)


def _adjusted(most: float, peak: float, off: float) -> float:
    return max(most, peak * 0.975) if off > 0 else min(most, peak * 1.025)


def _controlled(state: TgsState, rate: float) -> TgsState:
    fresh = replace(state, limit=INITIAL_LIMIT, slow_start=True)
    if state.controlled == 1:
        return fresh
    idle = sum(one < IDLE_RATE for one in state.rates)
    if idle > SAMPLES // 5 * 2 and state.controlled >= WARM_SAMPLES:
        return replace(fresh, limit=UNLIMITED)
    if idle == 2 and state.controlled > WARM_SAMPLES:
        return fresh
    return _limited(state, rate)


def _limited(state: TgsState, rate: float) -> TgsState:
    delta = abs(rate - state.most) / state.most if state.most else float("inf")
    limit, slow_start, falling = state.limit, state.slow_start, state.falling
    if slow_start and delta <= THRESHOLD:
        limit = limit * 1.5 + 1
    elif slow_start:
        limit, slow_start, falling = limit / 1.5, False, True
    else:
        near = delta <= THRESHOLD if falling else delta < THRESHOLD
        limit += max(state.most * 0.00025, LEAST_STEP) if near else -max(limit * 0.08, LEAST_STEP)
        falling = not near
        if delta >= 3 * THRESHOLD:
            limit, slow_start = limit / 10, True
    worse, most = (state.worse + 1 if delta >= 0.12 else 0), state.most
    if worse >= 20:
        worse, most, limit, slow_start = 0, most * 0.8, limit / 2, True
    limit = min(UNLIMITED, max(0.0, limit))
    return replace(state, limit=limit, slow_start=slow_start, falling=falling, worse=worse, most=most)
