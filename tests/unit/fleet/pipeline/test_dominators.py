# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Dominators and sequences, against what they are defined as."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.model import FleetError
from fleet.pipeline.dominators import LONGEST, Graph, dominators, graph, postdominators, sequences


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    count = draw(st.integers(1, 7))
    return graph({f"s{i}": [f"s{j}" for j in range(i) if draw(st.booleans())] for i in range(count)})


def paths(shape: Graph) -> list[tuple[int, ...]]:
    """From a stage that waits for none to one that none waits for."""

    def onward(path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if not shape.after[path[-1]]:
            yield path
        for stage in shape.after[path[-1]]:
            yield from onward((*path, stage))

    return [path for stage, earlier in enumerate(shape.before) if not earlier for path in onward((stage,))]


@given(shape=graphs())
def test_the_nearest_dominator_is_the_last_stage_that_all_paths_to_a_stage_share(shape: Graph) -> None:
    for stage, found in enumerate(dominators(shape.before)):
        until = [path[: path.index(stage)] for path in paths(shape) if stage in path]
        shared = set(until[0]).intersection(*until[1:])
        assert found == max(shared, default=-1)


@given(shape=graphs())
def test_the_nearest_postdominator_is_the_first_stage_that_all_paths_from_a_stage_share(shape: Graph) -> None:
    for stage, found in enumerate(postdominators(shape)):
        beyond = [path[path.index(stage) + 1 :] for path in paths(shape) if stage in path]
        shared = set(beyond[0]).intersection(*beyond[1:])
        assert found == min(shared, default=-1)


@given(shape=graphs())
def test_every_path_takes_all_stages_of_a_sequence_or_none(shape: Graph) -> None:
    found = sequences(shape)
    assert sorted(stage for sequence in found for stage in sequence) == list(range(len(shape.names)))
    for sequence in found:
        assert 1 <= len(sequence) <= LONGEST
        for path in paths(shape):
            assert len(set(sequence) & set(path)) in (0, len(sequence))


def test_a_chain_is_cut_into_sequences_of_three() -> None:
    shape = graph({f"s{index}": [f"s{index - 1}"] if index else [] for index in range(7)})
    assert sequences(shape) == ((0, 1, 2), (3, 4, 5), (6,))


def test_both_ends_of_a_fork_are_one_sequence_and_its_branches_are_their_own() -> None:
    shape = graph({"in": [], "left": ["in"], "right": ["in"], "out": ["left", "right"]})
    assert {tuple(shape.names[stage] for stage in sequence) for sequence in sequences(shape)} == {
        ("in", "out"),
        ("left",),
        ("right",),
    }


@pytest.mark.parametrize(
    ("waits_for", "cycle"),
    [
        ({"a": ["a"]}, "a → a"),
        ({"a": ["c"], "b": ["a"], "c": ["b"]}, "a → b → c → a"),
        ({"in": [], "a": ["b", "in"], "b": ["a"], "out": ["b"]}, "a → b → a"),
    ],
)
def test_a_cycle_is_named_in_the_order_in_which_requests_would_go(waits_for: dict[str, list[str]], cycle: str) -> None:
    with pytest.raises(FleetError, match=f"stages {cycle} wait for each other"):
        graph(waits_for)
