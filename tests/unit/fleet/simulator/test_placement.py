# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fleet.simulator.cluster import Active, Cluster, Preempt, Start
from fleet.simulator.placement import Space, pick, rearrange
from fleet.simulator.slowdown import constant
from tests.support.simulated_jobs import job


def active(number: int, size: int, *gpus: int) -> Active:
    """A job that runs there, or waits."""
    return Active(number, job(str(number), 10, gpus=size), size, 10.0, 0.0, 0.0, gpus)


def cluster(jobs: list[Active], gpus: int, gpus_per_node: int) -> Cluster:
    """With the running ones of these jobs on it."""
    tenants = tuple(tuple(one.number for one in jobs if gpu in one.gpus) for gpu in range(gpus))
    waiting = tuple(one for one in jobs if not one.gpus)
    running = {one.number: one for one in jobs if one.gpus}
    return Cluster(tenants, waiting, running, gpus_per_node, constant(1.0))


def test_a_gang_takes_the_node_with_the_fewest_gpus_that_can_hold_it() -> None:
    assert pick(2, dict.fromkeys([0, 1, 2, 5, 6], 0.0), gpus_per_node=4) == (5, 6)


def test_a_gang_does_not_straddle_nodes_that_it_could_do_without() -> None:
    assert pick(2, dict.fromkeys([3, 4], 0.0), gpus_per_node=4) is None


def test_a_large_gang_takes_whole_nodes_and_one_part() -> None:
    free = dict.fromkeys([0, 1, 2, 3, 4, 5, 6, 8, 9], 0.0)
    assert pick(6, free, gpus_per_node=4) == (0, 1, 2, 3, 8, 9)


def test_lower_ranks_come_first() -> None:
    assert pick(2, {0: 5.0, 1: 1.0, 2: 3.0}, gpus_per_node=3) == (1, 2)


def test_of_two_nodes_the_one_whose_worst_gpu_ranks_lower_is_taken() -> None:
    assert pick(2, {0: 1.0, 1: 9.0, 2: 4.0, 3: 4.0}, gpus_per_node=2) == (2, 3)


@given(st.sets(st.integers(0, 15)), st.integers(1, 16), st.integers(1, 15), st.sampled_from([1, 2, 4, 8, 16]))
def test_where_a_gang_does_not_fit_no_larger_one_does(free: set[int], size: int, more: int, per_node: int) -> None:
    """What `Space` relies on when it refuses without looking."""
    ranks = dict.fromkeys(free, 0.0)
    if pick(size, ranks, per_node) is None:
        assert pick(size + more, ranks, per_node) is None


def test_space_hands_out_each_gpu_once() -> None:
    space = Space(range(4), 4)
    assert space.take(5) is None
    assert (space.take(3), space.take(2), space.take(1), space.take(1)) == ((0, 1, 2), None, (3,), None)
    assert not space


def test_those_who_run_move_only_if_a_gang_would_else_not_fit_on_a_node() -> None:
    jobs = [active(0, 2), active(1, 1, 0), active(2, 1, 2)]
    after = {act.number: act.gpus for act in rearrange(jobs, cluster(jobs, 4, 2)) if isinstance(act, Start)}
    assert after[0] in ((0, 1), (2, 3))
    assert {1, 2} & set(after)


def test_the_largest_are_placed_first_so_that_nobody_has_to_move() -> None:
    jobs = [active(0, 2, 0, 1), active(1, 1, 4), active(2, 1), active(3, 2), active(4, 2)]
    acts = rearrange(jobs, cluster(jobs, 8, 4))
    assert sorted(act.number for act in acts if isinstance(act, Start)) == [2, 3, 4]
    assert not any(isinstance(act, Preempt) for act in acts)


def test_the_last_in_the_order_makes_room_for_the_first() -> None:
    jobs = [active(0, 1), active(1, 1, 0), active(2, 1, 1)]
    assert rearrange(jobs, cluster(jobs, 2, 2)) == (Preempt(2), Start(0, (1,)))
