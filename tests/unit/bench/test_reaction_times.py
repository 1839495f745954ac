# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Reactions out of what was recorded: of the gate, and of the loop."""

from __future__ import annotations

from typing import Any

from bench.enforcement.convergence_plot import rolling_p99
from bench.latency.reaction_times import LEAST_REQUESTS, gate_reactions_ns, rank, tightened_at_ns, violated_at_ns

MS = 1_000_000


def decision(wall_ns: int, share: float, queued: int, container: str = "a") -> dict[str, Any]:
    return {"wall_ns": wall_ns, "container": container, "share_after": share, "max_queued_ns": queued}


def test_the_gate_reacted_when_the_last_launch_came_through() -> None:
    assert gate_reactions_ns([(100, 200)], [50, 90, 110, 130, 250]) == [30]


def test_a_launch_that_is_held_to_the_end_of_the_burst_did_not_come_through() -> None:
    assert gate_reactions_ns([(100, 200), (300, 400)], [50, 200, 390]) == [0, 90]


def test_without_a_launch_the_gate_was_shut_at_once() -> None:
    assert gate_reactions_ns([(100, 200)], []) == [0]


def test_the_promise_is_broken_when_the_last_seconds_p99_is_over_the_target() -> None:
    good = [(n * MS, 2 * MS) for n in range(LEAST_REQUESTS)]
    late = [(n * MS, 9 * MS) for n in range(LEAST_REQUESTS, LEAST_REQUESTS + 5)]
    assert violated_at_ns([*good, *late], 3 * MS) == late[0][0]
    assert violated_at_ns(good, 3 * MS) is None
    assert violated_at_ns(late, 3 * MS) is None, "too few to say"


def test_the_loop_gave_less_when_share_or_queue_shrank_after_the_step() -> None:
    found = [decision(10, 1.0, 500), decision(20, 1.0, 400), decision(30, 1.0, 450), decision(40, 0.7, 450)]
    assert tightened_at_ns(found, 0) == 20
    assert tightened_at_ns(found, 25) == 40
    assert tightened_at_ns(found, 45) is None


def test_another_containers_smaller_share_is_no_reaction() -> None:
    assert tightened_at_ns([decision(10, 1.0, 500), decision(20, 0.5, 500, "b")], 0) is None


def test_a_rank_is_a_value_that_was_there() -> None:
    assert rank([3.0, 1.0, 2.0], 0.5) == 2.0
    assert rank([1.0], 0.99) == 1.0


def test_a_rolling_p99_forgets_after_a_second_and_is_unknown_for_too_few() -> None:
    values = [(n / 100, 1.0) for n in range(100)] + [(1.0 + n / 100, 5.0) for n in range(100)]
    found = {round(at, 1): value for at, value in rolling_p99(values, 3.5)}
    assert found[0.5] == 1.0
    assert found[2.0] == 5.0
    assert 3.3 not in found
