# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Answers to one pod at a time carry the plan out, give no GPU twice, and say why not."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.extender.answers import ELSEWHERE, MOST_SCORE, TAKEN, WAITS, Board, choose, filter_nodes, prioritize
from fleet.match.plan import solve
from fleet.model import Job, Slot
from fleet.weights.table import Measured, Pair, Table

GIB = 1 << 30
EXACT = 10**9
TABLE = Table(
    {
        Pair("bert", "etl", "H100"): Measured(0.71, EXACT),
        Pair("bert", "train", "H100"): Measured(0.44, EXACT),
        Pair("t5", "etl", "H100"): Measured(0.30, EXACT),
        Pair("t5", "train", "H100"): Measured(0.40, EXACT),
    }
)


def slot(node: str, online: str | None, gib: int = 40) -> Slot:
    return Slot(node, f"GPU-{node}", "H100", online, 0.5, 0.010, 0.005, gib * GIB, None)


def job(key: str, kind: str, gib: int = 8) -> Job:
    return Job(key, kind, gib * GIB, 0.001)


def board(slots: list[Slot], jobs: list[Job]) -> Board:
    return Board.of(solve(slots, jobs, TABLE), TABLE)


NODES = ["a", "b"]
ETL, TRAIN = job("1", "etl"), job("2", "train")


def two() -> Board:
    """An etl and a train job for a GPU beside bert and one beside t5."""
    return board([slot("a", "bert"), slot("b", "t5")], [ETL, TRAIN])


def test_a_node_is_offered_for_the_job_that_the_plan_means_it_for() -> None:
    assert filter_nodes(two(), ETL, NODES).nodes == ("a",)
    assert filter_nodes(two(), TRAIN, NODES).nodes == ("b",)


def test_a_node_that_is_worth_more_to_another_job_says_to_which_and_how_much() -> None:
    assert filter_nodes(two(), TRAIN, NODES).refused == {"a": "worth more to etl (0.71 > 0.44)"}


def test_what_is_left_over_is_offered_where_the_planned_nodes_are_not_asked_about() -> None:
    found = board([slot("a", "bert"), slot("b", "bert"), slot("c", None)], [ETL])
    assert filter_nodes(found, ETL, ["a", "b", "c"]).nodes == ("c",)
    assert filter_nodes(found, ETL, ["a", "b", "c"]).refused == {"a": ELSEWHERE, "b": ELSEWHERE}
    assert filter_nodes(found, ETL, ["a", "b"]).nodes == ("a", "b")


def test_a_job_that_has_a_better_use_elsewhere_is_told_so() -> None:
    # train loses less beside t5 than etl does, though it would be worth more beside bert as well
    table = Table(
        {
            Pair("bert", "etl", "H100"): Measured(0.60, EXACT),
            Pair("bert", "train", "H100"): Measured(0.65, EXACT),
            Pair("t5", "etl", "H100"): Measured(0.10, EXACT),
            Pair("t5", "train", "H100"): Measured(0.50, EXACT),
        }
    )
    found = Board.of(solve([slot("a", "bert"), slot("b", "t5")], [ETL, TRAIN], table), table)
    assert filter_nodes(found, TRAIN, NODES).refused == {"a": ELSEWHERE}


def test_a_node_without_the_memory_says_how_much_is_needed() -> None:
    found = board([slot("a", "bert", gib=16)], [job("1", "etl", gib=20)])
    assert filter_nodes(found, job("1", "etl", gib=20), ["a", "unknown"]).refused == {
        "a": "no healthy GPU with 20 GiB",
        "unknown": "no healthy GPU with 20 GiB",
    }


def test_a_gpu_is_given_once() -> None:
    chosen = choose(two(), ETL, "a")
    assert chosen is not None
    assert (chosen.gpu, chosen.planned) == ("GPU-a", True)
    after = two().booked(chosen, ETL)
    assert choose(after, ETL, "a") is None
    assert filter_nodes(after, ETL, ["a"]).refused == {"a": TAKEN}


def test_one_more_job_of_a_type_waits_when_the_plans_pairs_are_used() -> None:
    one = board([slot("a", "bert")], [ETL, replace(ETL, key="5")])
    chosen = choose(one, ETL, "a")
    assert chosen is not None
    assert filter_nodes(one.booked(chosen, ETL), replace(ETL, key="5"), ["a"]).refused == {"a": TAKEN}


def test_a_type_that_came_since_gets_what_is_left_over() -> None:
    found = board([slot("a", "bert"), slot("b", None)], [ETL])
    planned = {one.slot.node for one in found.plan.placed}
    assert planned == {"b"}
    new = job("9", "train")
    assert filter_nodes(found, new, NODES).nodes == ("a",)
    chosen = choose(found, new, "a")
    assert chosen is not None
    assert not chosen.planned
    assert filter_nodes(found.booked(chosen, new), new, ["a"]).refused == {"a": TAKEN}


def test_a_type_that_came_since_waits_where_nothing_is_left_over_and_nothing_is_worth_more() -> None:
    found = board([slot("a", "bert")], [job("2", "train")])
    assert filter_nodes(found, ETL, ["a"]).refused == {"a": WAITS}


def test_a_job_that_asks_for_more_than_its_type_did_is_no_member_of_it() -> None:
    found = board([slot("a", "bert", gib=7)], [job("1", "etl", gib=7)])
    assert filter_nodes(found, job("2", "etl", gib=8), ["a"]).refused == {"a": "no healthy GPU with 8 GiB"}


def test_a_pair_that_cannot_run_is_refused_as_that() -> None:
    slow = replace(ETL, kind="slow", kernel_s=1.0)
    assert filter_nodes(two(), slow, ["a"]).refused == {"a": "cannot run beside bert, or nothing is known of the pair"}


def test_the_best_node_has_the_most_points_and_a_worse_one_fewer() -> None:
    slots = [slot("a", "bert"), slot("b", "t5"), slot("c", "bert", gib=1)]
    scores = prioritize(board(slots, []), ETL, ["a", "b", "c"])
    assert scores["a"] == MOST_SCORE
    assert scores["b"] == round(MOST_SCORE * 0.30 / 0.71)
    assert scores["c"] == 0


KINDS = st.lists(st.tuples(st.sampled_from(["etl", "train"]), st.integers(1, 50)), max_size=8)
GPUS = st.lists(st.tuples(st.sampled_from(["bert", "t5", None]), st.integers(1, 50)), max_size=8)


@given(GPUS, KINDS, st.randoms(use_true_random=False))
@settings(max_examples=25)
def test_pods_in_any_order_get_the_plans_value_and_no_gpu_twice(
    gpus: list[tuple[str | None, int]], kinds: list[tuple[str, int]], random: Random
) -> None:
    slots = [replace(slot(f"node-{at // 3}", online, gib), gpu=f"GPU-{at}") for at, (online, gib) in enumerate(gpus)]
    jobs = [job(f"job-{at}", kind, gib) for at, (kind, gib) in enumerate(kinds)]
    found = board(slots, jobs)
    order = list(jobs)
    random.shuffle(order)
    nodes = sorted({one.node for one in slots})
    value, given_away = 0.0, set()
    for one in order:
        offered = filter_nodes(found, one, nodes)
        assert sorted([*offered.nodes, *offered.refused]) == nodes
        if not offered.nodes:
            continue
        scores = prioritize(found, one, offered.nodes)
        assert all(0 <= score <= MOST_SCORE for score in scores.values())
        chosen = choose(found, one, max(offered.nodes, key=lambda node: (scores[node], node)))
        assert chosen is not None
        assert chosen.gpu not in given_away
        given_away.add(chosen.gpu)
        (place,) = (slot for slot in slots if slot.gpu == chosen.gpu)
        assert one.memory_bytes <= place.free_bytes
        weight = TABLE.weight(place, one)
        assert weight is not None
        value += weight.throughput
        found = found.booked(chosen, one)
    assert value == pytest.approx(found.plan.value, abs=0.02 * max(1, len(jobs)))
