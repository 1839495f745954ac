# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The certificate's weights are those of each type's easiest job, and its bound needs no solver."""

from __future__ import annotations

import numpy as np
import pytest

from fleet.match.certificate import easiest_weights, upper_bound
from fleet.match.types import Granularity, job_groups, rows
from fleet.model import Job, Slot
from fleet.weights.physical import Physical

GIB = 1 << 30
SLOTS = [Slot("n", f"GPU-{gib}", "H100", "bert", 0.5, 0.01, 0.01, int(gib * GIB), None) for gib in (3.2, 3.8, 9.0)]


def test_no_member_of_a_type_is_worth_more_than_the_certificate_takes_it_for() -> None:
    jobs = [Job("a", "etl", 3 * GIB, 1.02e-3), Job("b", "etl", int(3.5 * GIB), 1.0e-3), Job("c", "train", GIB, 1e-3)]
    groups = job_groups(jobs, Granularity())
    assert [group.members for group in groups] == [(0, 1), (2,)]
    hardest = rows(Physical(), SLOTS, [group.hardest for group in groups])
    easiest = easiest_weights(Physical(), SLOTS, groups, hardest)
    assert np.isnan(hardest[0, 0])
    members = rows(Physical(), SLOTS, jobs)
    assert not np.isnan(easiest[:, 0]).any()
    assert (easiest[:, [0, 0, 1]] >= np.nan_to_num(members)).all()
    assert np.array_equal(easiest[:, 1], hardest[:, 1])


def test_the_bound_is_exact_at_the_optimums_prices_and_looser_at_others() -> None:
    worth = np.array([[0.9, 0.5], [0.8, 0.1]])  # the optimum crosses: .5 + .8
    assert upper_bound(worth, [0.7, 0.3], [1, 1]) == pytest.approx(1.3)
    assert upper_bound(worth, [0.0, 0.0], [1, 1]) == pytest.approx(1.7)
    assert upper_bound(worth, [-5.0, -5.0], [1, 1]) == pytest.approx(1.7)


def test_slots_without_a_pair_add_nothing() -> None:
    assert upper_bound(np.full((3, 2), np.nan), [0.0, 0.0], [1, 1]) == 0
    assert upper_bound(np.empty((0, 2)), [0.5, 0.5], [0, 0]) == 0
