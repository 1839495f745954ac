# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`tgs` as published: what it does with the production job's launch rate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.core.model import ContainerKey, DeviceUuid
from enforce.controller.laws.tgs import INITIAL_LIMIT, RATE_NS, SAMPLES, UNLIMITED, WARM_SAMPLES, Tgs, TgsState
from enforce.model import OnlineOn
from enforce.policy.model import Slo

LAW = Tgs(sample_ns=RATE_NS)
SLO = Slo("gpu_wait", 0.99, 5_000_000, 10_000_000_000, 20)
ALONE = 1_000_000.0


def play(rates: list[float], state: TgsState | None = None) -> list[TgsState]:
    """One sample for each rate, in blocks per sample."""
    state, total, now, states = state or LAW.start(), 0.0, 0, []
    if state.sampled_ns is not None:
        now, total = state.sampled_ns, float(state.blocks)
    else:
        state, _ = LAW.step(state, online(0), 0)
    for rate in rates:
        now, total = now + RATE_NS, total + rate
        state, _ = LAW.step(state, online(int(total)), now)
        states.append(state)
    return states


def online(blocks: int | None) -> OnlineOn:
    return OnlineOn(ContainerKey("chat"), DeviceUuid("GPU-0"), SLO, None, None, blocks)


def steady(count: int, around: float = ALONE) -> list[float]:
    """Production as it is: never twice the same."""
    return [around * (1 - 0.001 * (n % 7)) for n in range(count)]


def controlled() -> TgsState:
    """After the profile, with the initial limit."""
    return next(state for state in play(steady(40)) if state.controlled == 1)


def test_nothing_is_let_through_while_production_is_profiled() -> None:
    profiling = [state for state in play(steady(40)) if state.controlled == 0]
    assert len(profiling) >= SAMPLES
    assert {state.limit for state in profiling} == {0.0}
    assert controlled().limit == INITIAL_LIMIT


def test_production_that_is_not_disturbed_makes_the_limit_grow_by_half() -> None:
    first = controlled()
    after = play(steady(3), first)
    assert [state.limit for state in after] == [INITIAL_LIMIT * 1.5 + 1, 45002.5, 67504.75]


def test_a_disturbed_production_ends_the_slow_start() -> None:
    (state,) = play([ALONE * 0.95], controlled())
    assert state.limit == INITIAL_LIMIT / 1.5
    assert not state.slow_start


def test_in_avoidance_the_limit_creeps_up_and_falls_by_a_part() -> None:
    (avoiding,) = play([ALONE * 0.95], controlled())
    (up,) = play([ALONE], avoiding)
    assert up.limit == avoiding.limit + 1000
    (down,) = play([ALONE * 0.95], up)
    assert down.limit == up.limit - max(0.08 * up.limit, 1000)


def test_a_much_disturbed_production_restarts_with_a_tenth() -> None:
    (avoiding,) = play([ALONE * 0.95], controlled())
    (state,) = play([ALONE * 0.9], avoiding)
    assert state.slow_start
    assert state.limit == (avoiding.limit - max(0.08 * avoiding.limit, 1000)) / 10


def test_an_idle_production_lets_everything_through() -> None:
    states = play(steady(WARM_SAMPLES), controlled())
    assert any(state.limit >= UNLIMITED for state in play([1.0] * 4, states[-1]))


def test_without_knowing_productions_launches_nothing_is_limited() -> None:
    _, share = LAW.step(LAW.start(), online(None), 0)
    assert share.blocks == UNLIMITED


def test_a_sample_of_another_length_means_the_same_rates() -> None:
    law = Tgs(sample_ns=RATE_NS // 10)
    state, _ = law.step(law.start(), online(0), 0)
    state, _ = law.step(state, online(100_000), RATE_NS // 10)
    assert state.rates[0] == ALONE


@given(st.lists(st.floats(0, 1e9), max_size=100))
def test_the_limit_is_never_negative_and_never_without_bound(rates: list[float]) -> None:
    assert all(0 <= state.limit <= UNLIMITED for state in play(rates))
