# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The prior's formula and what cannot run, the table over it, and what both keep to."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.model import FleetError, Job, Predictor, Slot
from fleet.weights import BUILTIN
from fleet.weights.physical import Physical
from fleet.weights.table import Measured, Pair, Table, parse, parse_colocation

GIB = 1 << 30
SLOT = Slot("node", "GPU-0", "H100", "bert", 0.4, 0.010, 0.005, 40 * GIB, None)
JOB = Job("job", "etl", 8 * GIB, 0.001)
PAIR = Pair("bert", "etl", "H100")


def throughput(predictor: Predictor, slot: Slot = SLOT, job: Job = JOB) -> float | None:
    found = predictor.weight(slot, job)
    return None if found is None else found.throughput


def test_the_prior_is_the_time_left_less_what_each_gap_loses() -> None:
    assert throughput(Physical()) == pytest.approx(0.6 * exp(-(0.15e-3 + 0.5e-3) / 0.010))


def test_a_gpu_without_an_online_service_gives_all() -> None:
    assert throughput(Physical(), replace(SLOT, online=None), replace(JOB, kernel_s=None)) == 1.0


def test_under_mps_the_share_of_the_sms_is_what_the_job_gets_whatever_its_kernels() -> None:
    assert throughput(Physical(), replace(SLOT, spatial=0.7), replace(JOB, kernel_s=1.0)) == 0.7


@pytest.mark.parametrize(
    ("slot", "job"),
    [
        (replace(SLOT, free_bytes=8 * GIB - 1), JOB),
        (SLOT, replace(JOB, kernel_s=0.006)),
        (SLOT, replace(JOB, kernel_s=None)),
        (replace(SLOT, load=float("nan")), JOB),
        (replace(SLOT, gap_s=-1.0), JOB),
        (replace(SLOT, load=1.5), JOB),
    ],
    ids=["memory", "kernel over the slack", "kernel unknown", "load unknown", "gap negative", "load over 1"],
)
def test_what_cannot_run_or_is_unknown_is_no_pair(slot: Slot, job: Job) -> None:
    assert Physical().weight(slot, job) is None


def test_memory_in_reserve_is_not_given_away() -> None:
    assert throughput(Physical(reserve_bytes=32 * GIB)) is not None
    assert throughput(Physical(reserve_bytes=32 * GIB + 1)) is None


def test_a_job_of_unknown_kernels_can_be_taken_at_an_assumed_length() -> None:
    assert throughput(Physical(assumed_kernel_s=0.001), job=replace(JOB, kernel_s=None)) == throughput(Physical())


@given(st.floats(0.0, 1.0), st.integers(1, 1000))
def test_measurements_take_over_from_the_prior_as_they_grow(measured: float, count: int) -> None:
    prior, found = throughput(Physical()), throughput(Table({PAIR: Measured(measured, count)}))
    assert prior is not None
    assert found is not None
    assert abs(found - measured) == pytest.approx(abs(prior - measured) * 3 / (count + 3), abs=1e-9)


def test_a_measurement_is_scaled_by_how_the_prior_changed() -> None:
    prior = throughput(Physical())
    assert prior is not None
    table = Table({PAIR: Measured(0.8 * prior, 10**9, prior)})
    later = replace(SLOT, load=0.7)
    assert throughput(table, later) == pytest.approx(0.8 * (throughput(Physical(), later) or 0.0), rel=1e-6)


def test_a_measured_pair_that_does_not_fit_now_is_no_pair() -> None:
    table = Table({PAIR: Measured(0.9, 100)})
    assert throughput(table, replace(SLOT, free_bytes=GIB)) is None


def test_a_measured_pair_needs_no_kernel_length() -> None:
    assert throughput(Table({PAIR: Measured(0.4, 1)}), job=replace(JOB, kernel_s=None)) == 0.4


def test_more_measurements_make_the_expected_error_less() -> None:
    errors = [Table({PAIR: Measured(0.5, count)}).weight(SLOT, JOB) for count in (1, 10, 100)]
    found = [one.error for one in errors if one is not None]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == 3


def test_a_new_measurement_moves_the_mean() -> None:
    table = Table({}).with_measurement(PAIR, 0.4, 0.5).with_measurement(PAIR, 0.6, 0.7)
    found = table.pairs[PAIR]
    assert found.throughput == pytest.approx(0.5)
    assert found.count == 2
    assert found.prior == pytest.approx(0.6)
    with pytest.raises(FleetError):
        table.with_measurement(PAIR, float("nan"), None)


PREDICTORS = st.sampled_from(
    [
        Physical(),
        Physical(assumed_kernel_s=0.002),
        Table({PAIR: Measured(0.7, 3, 0.5)}),
        Table({PAIR: Measured(0.2, 3)}),
    ]
)
SLOTS = st.builds(
    replace,
    st.just(SLOT),
    online=st.sampled_from(["bert", "t5", None]),
    load=st.floats(0.0, 1.0),
    gap_s=st.floats(1e-5, 1.0),
    spatial=st.sampled_from([None, 0.5]),
)


@given(PREDICTORS, SLOTS, st.integers(0, 60 * GIB), st.floats(0.0, 0.01), st.floats(0.0, 1.0))
def test_a_smaller_job_with_shorter_kernels_never_gets_less(
    predictor: Predictor, slot: Slot, memory: int, kernel_s: float, part: float
) -> None:
    harder = replace(JOB, memory_bytes=memory, kernel_s=kernel_s)
    easier = replace(JOB, memory_bytes=int(memory * part), kernel_s=kernel_s * part)
    least, most = throughput(predictor, slot, harder), throughput(predictor, slot, easier)
    assert least is None or (most is not None and most >= least)


@given(PREDICTORS, SLOTS, st.one_of(st.none(), st.floats(0.0, 0.01)))
def test_a_throughput_is_between_0_and_1(predictor: Predictor, slot: Slot, kernel_s: float | None) -> None:
    found = throughput(predictor, slot, replace(JOB, kernel_s=kernel_s))
    assert found is None or 0 <= found <= 1


@given(
    st.dictionaries(
        st.builds(Pair, *[st.sampled_from(["a", "B ß", '"', "\n", "('x', 1)"])] * 3),
        st.builds(Measured, st.floats(0.0, 2.0), st.integers(1, 99), st.one_of(st.none(), st.floats(0.0, 1.0))),
        max_size=5,
    )
)
def test_a_table_that_is_written_is_read_as_it_was(pairs: dict[Pair, Measured]) -> None:
    found = parse(Table(pairs).to_json())
    assert (found.table.pairs, sum(found.dropped.values())) == (pairs, 0)


def test_bad_rows_of_a_table_are_counted_by_reason() -> None:
    good = {"online": "a", "offline": "b", "model": "m", "throughput": 0.5, "count": 2, "prior": None}
    rows = [good, {**good, "count": "many"}, {"online": "a"}, {**good, "throughput": -1}, {**good, "count": 0}, "row"]
    found = parse(json.dumps({"pairs": rows}))
    assert found.table.pairs == {Pair("a", "b", "m"): Measured(0.5, 2)}
    assert found.dropped == {"a field is missing or of another type": 3, "throughput or count out of range": 2}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pairs": 1}'])
def test_a_file_that_is_no_table_is_refused(text: str) -> None:
    with pytest.raises(FleetError):
        parse(text)


def test_a_colocation_table_gives_the_second_jobs_rate_to_its_own_alone() -> None:
    table = {
        "v100": {
            "one": {"null": 10.0, "one": [5.0, 5.0], "two": [8.0, 3.0]},
            "two": {"null": [4.0], "one": [3.0, 8.0], "two": [0.0, 0.0], "three": [1.0, 1.0]},
        }
    }
    found = parse_colocation(json.dumps(table), count=5)
    assert {pair: one.throughput for pair, one in found.table.pairs.items()} == {
        Pair("one", "one", "v100"): 0.5,
        Pair("one", "two", "v100"): 0.75,
        Pair("two", "one", "v100"): 0.8,
    }
    assert found.dropped == {"a rate of 0: the pair did not run": 1, "the offline job's rate alone is unknown": 1}
    assert {one.count for one in found.table.pairs.values()} == {5}


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"v100": 3}', '{"v100": {"a": {"null": 1}}}'])
def test_a_file_that_is_no_colocation_table_is_refused(text: str) -> None:
    with pytest.raises(FleetError):
        parse_colocation(text)


def test_a_window_that_does_not_say_what_the_load_was_forgets_none_of_the_load_of_the_others() -> None:
    table = Table({}).with_measurement(PAIR, 0.4, 0.5).with_measurement(PAIR, 0.6, None)
    assert (table.pairs[PAIR].count, table.pairs[PAIR].prior) == (2, 0.5)
    known_again = Table({}).with_measurement(PAIR, 0.4, None).with_measurement(PAIR, 0.6, 0.7)
    assert known_again.pairs[PAIR].prior == 0.7


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_each_predictor_by_name_is_called_so_and_weighs_a_pair(name: str) -> None:
    predictor = BUILTIN[name](Table({PAIR: Measured(0.5, 3)}))
    assert predictor.name == name
    assert predictor.weight(SLOT, JOB) is not None
