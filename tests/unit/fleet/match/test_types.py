# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Types lose no feasibility: what a type can run, each member can run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.match.types import Granularity, job_groups, job_key, mean_weights, rows, slot_groups
from fleet.model import FleetError, Job, Slot, Weight
from fleet.weights.physical import Physical

GIB = 1 << 30
SLOT = Slot("node", "GPU-0", "H100", "bert", 0.5, 0.01, 0.005, 40 * GIB, None)

SLOTS = st.builds(
    Slot,
    node=st.just("node"),
    gpu=st.just("GPU"),
    model=st.sampled_from(["H100", "A100"]),
    online=st.sampled_from(["bert", "t5", None]),
    load=st.floats(0.0, 1.0),
    gap_s=st.floats(1e-4, 1.0),
    slack_s=st.floats(0.0, 0.05),
    free_bytes=st.integers(1 * GIB, 80 * GIB),
    spatial=st.sampled_from([None, 0.3, 0.7]),
)
JOBS = st.builds(
    Job,
    key=st.just("job"),
    kind=st.sampled_from(["etl", "train", "render"]),
    memory_bytes=st.integers(0, 80 * GIB),
    kernel_s=st.one_of(st.none(), st.floats(1e-5, 0.05)),
    value=st.sampled_from([1.0, 2.0]),
)


@settings(max_examples=40)
@given(st.lists(SLOTS, max_size=20), st.lists(JOBS, min_size=1, max_size=20))
def test_what_a_type_can_run_each_member_can_run(slots: list[Slot], jobs: list[Job]) -> None:
    predictor, granularity = Physical(), Granularity()
    groups = job_groups(jobs, granularity)
    weights = rows(predictor, slots, [group.hardest for group in groups])
    slot_types = slot_groups(slots, weights, granularity)
    means = mean_weights(slot_types, weights)
    for at, members in enumerate(slot_types):
        for column, group in enumerate(groups):
            found = [predictor.weight(slots[slot], jobs[job]) for slot in members for job in group.members]
            assert np.isnan(means[at, column]) or None not in found


@settings(max_examples=40)
@given(st.lists(SLOTS, max_size=20), st.lists(JOBS, min_size=1, max_size=20))
def test_members_of_a_type_differ_by_a_step_at_most_in_their_least_and_largest_weight(
    slots: list[Slot], jobs: list[Job]
) -> None:
    granularity = Granularity(alike=0.0)
    weights = rows(Physical(), slots, [group.hardest for group in job_groups(jobs, granularity)])
    for members in slot_groups(slots, weights, granularity):
        for extreme in (np.nanmin, np.nanmax):
            found = extreme(weights[list(members)], axis=1)
            assert found.max() - found.min() <= granularity.weight + 1e-9


@settings(max_examples=40)
@given(st.lists(SLOTS, max_size=20), st.lists(JOBS, min_size=1, max_size=20))
def test_each_slot_with_a_pair_and_each_job_is_of_one_type(slots: list[Slot], jobs: list[Job]) -> None:
    granularity = Granularity()
    groups = job_groups(jobs, granularity)
    weights = rows(Physical(), slots, [group.hardest for group in groups])
    assert sorted(job for group in groups for job in group.members) == list(range(len(jobs)))
    typed = sorted(slot for members in slot_groups(slots, weights, granularity) for slot in members)
    assert typed == [place for place in range(len(slots)) if not np.isnan(weights[place]).all()]


@given(st.lists(JOBS, min_size=1, max_size=20))
def test_the_hardest_and_the_easiest_job_of_a_type_enclose_all_members(jobs: list[Job]) -> None:
    for group in job_groups(jobs, Granularity()):
        for place in group.members:
            job = jobs[place]
            assert group.easiest.memory_bytes <= job.memory_bytes <= group.hardest.memory_bytes
            if job.kernel_s is not None:
                assert (group.easiest.kernel_s or 0) <= job.kernel_s <= (group.hardest.kernel_s or 0)


def test_slots_that_differ_only_in_load_beyond_what_weights_show_are_of_one_type() -> None:
    slots = [replace(SLOT, gpu="a"), replace(SLOT, gpu="b", load=0.504), replace(SLOT, gpu="c", load=0.9)]
    weights = rows(Physical(), slots, [Job("j", "etl", GIB, 1e-3)])
    assert slot_groups(slots, weights, Granularity()) == [(0, 1), (2,)]


def test_types_of_two_services_whose_weights_agree_are_one() -> None:
    slots = [replace(SLOT, gpu="a"), replace(SLOT, gpu="b", online="t5", model="A100")]
    weights = rows(Physical(), slots, [Job("j", "etl", GIB, 1e-3)])
    assert slot_groups(slots, weights, Granularity()) == [(0, 1)]


def test_a_slot_that_can_run_one_job_less_is_of_another_type() -> None:
    slots = [SLOT, replace(SLOT, gpu="b", free_bytes=39 * GIB)]
    weights = rows(Physical(), slots, [Job("j", "etl", GIB, 1e-3), Job("k", "train", 40 * GIB, 1e-3)])
    assert slot_groups(slots, weights, Granularity()) == [(0,), (1,)]


def test_halved_steps_are_finer_in_each_respect() -> None:
    job = Job("j", "etl", 3 * GIB, 1e-3)
    coarse = Granularity()
    for finer, coarser in pairwise([coarse.halved().halved(), coarse.halved(), coarse, coarse.doubled()]):
        assert finer.weight < coarser.weight
        assert finer.kernel_ratio < coarser.kernel_ratio
    other = replace(job, memory_bytes=int(3.5 * GIB))
    assert job_key(job, coarse) == job_key(other, coarse)
    assert job_key(job, coarse.halved().halved()) != job_key(other, coarse.halved().halved())


def test_a_predictor_that_knows_only_pairs_gives_the_same_rows() -> None:
    class Slow:
        name = "slow"

        def weight(self, slot: Slot, job: Job) -> Weight | None:
            return Physical().weight(slot, job)

    slots = [SLOT, replace(SLOT, free_bytes=GIB), replace(SLOT, online=None)]
    jobs = [Job("j", "etl", 2 * GIB, 1e-3), Job("k", "train", GIB, None)]
    assert np.array_equal(rows(Slow(), slots, jobs), rows(Physical(), slots, jobs), equal_nan=True)


def test_more_cells_than_memory_allows_are_refused_with_what_to_do() -> None:
    with pytest.raises(FleetError, match="one kind"):
        rows(Physical(), [SLOT] * 10_000, [Job("j", "etl", GIB, None)] * 10_000)
