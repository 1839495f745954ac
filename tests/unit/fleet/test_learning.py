# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Windows are judged once and in their order, whenever and however often the learner is called."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fleet.learning import MOST_BACK, Learner
from fleet.model import FleetError, Job
from fleet.sources.prometheus import Query, Sample
from fleet.sources.windows import Running
from fleet.weights.experience import Experience
from fleet.weights.table import Table

RUNNING = {"batch/etl-1": Running(Job("batch/etl-1", "etl", 1 << 33, 0.002), 0.7)}
STEP_S = 300.0
NOW_S = 1e9


class Asked:
    """A Prometheus that knows nothing, and notes for which times it was asked what."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.measured: list[float] = []
        self.away = False

    def __call__(self, at_s: float) -> Query:
        self.times.append(at_s)

        def query(expression: str) -> Sequence[Sample]:
            if self.away:
                raise FleetError("away")
            if "offset" in expression:
                self.measured.append(at_s)
            return ()

        return query


def learner(asked: Asked) -> Learner:
    return Learner(Experience(Table({})), asked, 2 * STEP_S, NOW_S)


@given(st.lists(st.floats(0.0, 2000.0), max_size=20))
def test_each_window_is_judged_once_and_in_order_whenever_it_is_called(pauses: list[float]) -> None:
    asked, now_s = Asked(), NOW_S
    found = learner(asked)
    for pause_s in (0.0, *pauses):
        now_s += pause_s
        while found.advance(RUNNING, now_s):
            pass
    steps = [time / STEP_S for time in asked.times]
    assert steps == list(range(int(steps[0]), int(now_s // STEP_S) + 1))
    assert asked.times[0] >= NOW_S - (MOST_BACK + 1) * STEP_S


def test_throughputs_are_measured_over_windows_that_do_not_overlap() -> None:
    asked = Asked()
    found = learner(asked)
    while found.advance(RUNNING, NOW_S):
        pass
    apart = {later - earlier for earlier, later in zip(asked.measured, asked.measured[1:], strict=False)}
    assert apart == {2 * STEP_S}


def test_a_window_that_cannot_be_read_is_tried_again_and_reported() -> None:
    asked = Asked()
    asked.away = True
    found = learner(asked)
    assert not found.advance(RUNNING, NOW_S)
    assert found.lessons(NOW_S).failure == "away"
    asked.away = False
    assert found.advance(RUNNING, NOW_S)
    assert asked.times[0] == asked.times[1]
    assert found.lessons(NOW_S).failure is None


def test_a_window_that_can_never_be_read_is_given_up_when_it_is_too_old() -> None:
    asked = Asked()
    asked.away = True
    found = learner(asked)
    for hours in range(8):
        found.advance(RUNNING, NOW_S + hours * 3600)
    assert asked.times[-1] >= NOW_S + 7 * 3600 - (MOST_BACK + 1) * STEP_S


def test_without_pods_nothing_is_asked() -> None:
    asked = Asked()
    found = learner(asked)
    while found.advance({}, NOW_S):
        pass
    assert asked.times == []
