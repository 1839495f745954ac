# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A pair that misses its promise is worth half for an hour, and for twice as long each further time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.model import Job, Slot, throughput_rows
from fleet.weights.penalties import LONGEST_S, Penalised, Penalties
from fleet.weights.physical import Physical
from fleet.weights.table import Pair

HOUR = 3600.0
PAIR = Pair("bert", "etl", "H100")
SLOT = Slot("node", "GPU-0", "H100", "bert", 0.4, 0.010, 0.005, 1 << 35, None)
JOB, OTHER = Job("job", "etl", 0, 0.001), Job("other", "train", 0, 0.001)


def test_a_miss_halves_the_pair_for_an_hour() -> None:
    found = Penalties().missed(PAIR, 0.0)
    assert [found.factor(PAIR, now) for now in (0.0, HOUR - 1, HOUR)] == [0.5, 0.5, 1.0]


def test_each_further_miss_lasts_twice_as_long() -> None:
    found, now = Penalties(), 0.0
    for hours in (1, 2, 4, 8):
        found = found.missed(PAIR, now)
        assert found.factor(PAIR, now + hours * HOUR - 1) == 0.5
        now += hours * HOUR
        assert found.factor(PAIR, now) == 1.0


def test_after_as_long_again_without_a_miss_the_doubling_is_forgotten() -> None:
    found = Penalties().missed(PAIR, 0.0).missed(PAIR, HOUR)  # until 3 h, remembered until 5 h
    assert found.missed(PAIR, 5 * HOUR - 1).by_pair[PAIR].length_s == 4 * HOUR
    assert found.missed(PAIR, 5 * HOUR).by_pair[PAIR].length_s == HOUR


def test_other_pairs_keep_their_weight() -> None:
    found = Penalties().missed(PAIR, 0.0)
    assert found.factor(Pair("bert", "train", "H100"), 1.0) == 1.0
    assert found.factor(Pair("bert", "etl", "A100"), 1.0) == 1.0


@given(st.lists(st.floats(0.0, 1e7), max_size=30))
def test_a_penalty_ends_and_is_forgotten_whatever_happened(times: list[float]) -> None:
    found = Penalties()
    for now in sorted(times):
        found = found.missed(PAIR, now)
    end = max(times, default=0.0) + 2 * LONGEST_S
    assert found.factor(PAIR, end) == 1.0
    assert not found.current(end).by_pair


def test_a_penalised_predictor_halves_the_pair_says_so_and_agrees_with_its_rows() -> None:
    plain, missed = Physical(), Penalised(Physical(), Penalties().missed(PAIR, 0.0), 1.0)
    before, after = plain.weight(SLOT, JOB), missed.weight(SLOT, JOB)
    assert before is not None
    assert after is not None
    assert after.throughput == before.throughput / 2
    assert "missed its promise" in after.why
    assert missed.weight(SLOT, OTHER) == plain.weight(SLOT, OTHER)
    (row,) = throughput_rows(missed, [SLOT], [JOB, OTHER])
    assert row == [after.throughput, throughput_rows(plain, [SLOT], [OTHER]).__next__()[0]]
