# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The split of a pipeline's SLO: against every choice of levels, and along every path."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.model import FleetError
from fleet.pipeline.dominators import graph, longest_path
from fleet.pipeline.search import Level
from fleet.pipeline.split import Pipeline, Stage, settled, split

LATENCIES = st.integers(1, 200).map(lambda milliseconds: milliseconds / 1000)
OFFLINE = st.integers(0, 100).map(lambda percent: percent / 100)


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int = 4, most_levels: int = 8) -> Pipeline:
    """Possible ones: between the longest path at the fastest levels and that at the slowest."""
    stages = []
    for index in range(draw(st.integers(1, most_stages))):
        levels = draw(st.lists(st.builds(Level, LATENCIES, OFFLINE), min_size=1, max_size=most_levels))
        after = [f"s{earlier}" for earlier in range(index) if draw(st.booleans())]
        stages.append(Stage(f"s{index}", tuple(levels), tuple(after)))
    fastest_s, slowest_s = (
        max(lengths(stages, {stage.name: pick(level.latency_s for level in stage.levels) for stage in stages}))
        for pick in (min, max)
    )
    return Pipeline(fastest_s + draw(st.floats(0, 1)) * (slowest_s - fastest_s), tuple(stages))


def paths(stages: list[Stage] | tuple[Stage, ...]) -> Iterator[tuple[str, ...]]:
    """Every way that a request can go, by walking; written apart from the product's own graph."""
    by_name = {stage.name: stage for stage in stages}
    ends = set(by_name) - {earlier for stage in stages for earlier in stage.after}

    def back(name: str) -> Iterator[tuple[str, ...]]:
        if not by_name[name].after:
            yield (name,)
        for earlier in by_name[name].after:
            for path in back(earlier):
                yield (*path, name)

    for end in sorted(ends):
        yield from back(end)


def lengths(stages: list[Stage] | tuple[Stage, ...], of: dict[str, float]) -> list[float]:
    return [sum(of[name] for name in path) for path in paths(stages)]


def brute_force(pipeline: Pipeline) -> float:
    """The most that any choice of levels leaves."""
    every = list(paths(pipeline.stages))
    index = {stage.name: number for number, stage in enumerate(pipeline.stages)}
    best = -1.0
    for choice in itertools.product(*(stage.levels for stage in pipeline.stages)):
        if all(sum(choice[index[name]].latency_s for name in path) <= pipeline.slo_s * (1 + 1e-12) for path in every):
            best = max(best, sum(level.offline for level in choice))
    return best


@given(pipeline=pipelines())
def test_the_split_leaves_as_much_as_the_best_of_all_choices(pipeline: Pipeline) -> None:
    found = split(pipeline)
    best = brute_force(pipeline)
    assert found.offline >= 0.99 * best - 1e-9
    assert found.offline <= best + 1e-9
    if found.exact:
        assert found.offline == pytest.approx(best)


@given(pipeline=pipelines(most_stages=9, most_levels=6))
def test_the_parts_add_up_to_at_most_the_slo_along_every_path(pipeline: Pipeline) -> None:
    found = split(pipeline)
    parts = {part.name: part for part in found.parts}
    assert set(parts) == {stage.name for stage in pipeline.stages}
    for length in lengths(pipeline.stages, {name: part.slo_s for name, part in parts.items()}):
        assert length <= pipeline.slo_s * (1 + 1e-9)
    for stage in pipeline.stages:
        part = parts[stage.name]
        assert part.level in stage.levels
        assert part.level.latency_s <= part.slo_s * (1 + 1e-9)
    assert found.offline == pytest.approx(sum(part.level.offline for part in found.parts))


@given(pipeline=pipelines(most_stages=7, most_levels=6))
def test_a_search_that_ends_early_still_fits_and_says_so(pipeline: Pipeline) -> None:
    found, whole = split(pipeline, most_steps=2), split(pipeline, most_steps=100_000)
    for length in lengths(pipeline.stages, {part.name: part.slo_s for part in found.parts}):
        assert length <= pipeline.slo_s * (1 + 1e-9)
    assert whole.exact
    assert found.offline <= whole.offline + 1e-9
    assert not found.exact or found.offline == pytest.approx(whole.offline)


@given(pipeline=pipelines(), more=st.floats(1, 3))
def test_a_longer_slo_leaves_no_less(pipeline: Pipeline, more: float) -> None:
    assert split(Pipeline(pipeline.slo_s * more, pipeline.stages)).offline >= split(pipeline).offline - 1e-9


def chain(*levels: tuple[Level, ...]) -> tuple[Stage, ...]:
    return tuple(Stage(f"s{index}", entry, (f"s{index - 1}",) if index else ()) for index, entry in enumerate(levels))


def test_the_stage_that_gains_most_gets_the_slack() -> None:
    slow_gain = (Level(0.01, 0.1), Level(0.05, 0.2))
    fast_gain = (Level(0.01, 0.1), Level(0.05, 0.9))
    first, second = split(Pipeline(0.06, chain(slow_gain, fast_gain))).parts
    assert first.level == slow_gain[0]
    assert second.level == fast_gain[1]
    assert first.slo_s + second.slo_s == pytest.approx(0.06)


def test_a_branch_that_is_not_the_longest_keeps_its_own_slack() -> None:
    stages = (
        Stage("in", (Level(0.01, 0.5),)),
        Stage("long", (Level(0.08, 0.5),), ("in",)),
        Stage("short", (Level(0.01, 0.1), Level(0.07, 0.6)), ("in",)),
        Stage("out", (Level(0.01, 0.5),), ("long", "short")),
    )
    parts = {part.name: part for part in split(Pipeline(0.1, stages)).parts}
    assert parts["short"].level.offline == 0.6
    assert parts["long"].slo_s == pytest.approx(0.08)


def test_a_level_that_is_slower_and_leaves_no_more_is_never_taken() -> None:
    (part,) = split(Pipeline(1.0, chain((Level(0.2, 0.5), Level(0.1, 0.5), Level(0.3, 0.4))))).parts
    assert part.level == Level(0.1, 0.5)


def test_an_impossible_slo_is_answered_with_the_path_that_is_too_long() -> None:
    with pytest.raises(FleetError, match=r"50 ms: s0 → s1 takes 80 ms at the fastest levels; raise the SLO"):
        split(Pipeline(0.05, chain((Level(0.03, 0.1),), (Level(0.05, 0.1), Level(0.09, 0.2)))))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ((), "no stages"),
        ((Stage("a", (Level(0.1, 0.1),), ("b",)),), "'a' comes after 'b', which is no stage"),
        ((Stage("a", (Level(0.1, 0.1),)),) * 2, "two stages are called 'a'"),
        ((Stage("a", ()),), "0 levels"),
        ((Stage("a", (Level(0.0, 0.1),)),), "latency is above 0"),
        ((Stage("a", (Level(float("nan"), 0.1),)),), "latency is above 0"),
        ((Stage("a", (Level(0.1, 1.1),)),), "offline is 0 to 1"),
        (tuple(Stage(f"s{index}", (Level(0.1, 0.1),)) for index in range(65)), "at most 64"),
    ],
)
def test_what_is_no_pipeline_is_refused(stages: tuple[Stage, ...], message: str) -> None:
    with pytest.raises(FleetError, match=message):
        split(Pipeline(1.0, stages))


@pytest.mark.parametrize("slo_s", [0.0, -1.0, float("inf"), float("nan")])
def test_an_slo_has_to_be_a_time(slo_s: float) -> None:
    with pytest.raises(FleetError, match="a time above 0"):
        split(Pipeline(slo_s, chain((Level(0.1, 0.1),))))


def test_a_split_in_use_stays_while_it_fits_and_is_near() -> None:
    pipeline = Pipeline(0.1, chain((Level(0.05, 0.5),), (Level(0.05, 0.5),)))
    found = split(pipeline)
    assert settled(pipeline, {"s0": 0.05, "s1": 0.05}, found)
    assert not settled(pipeline, {"s0": 0.06, "s1": 0.05}, found)  # too long
    assert not settled(pipeline, {"s0": 0.05}, found)  # another pipeline
    near = Pipeline(0.1, chain((Level(0.03, 0.5),), (Level(0.03, 0.5),)))
    assert settled(near, {"s0": 0.046, "s1": 0.054}, split(near))
    assert not settled(near, {"s0": 0.04, "s1": 0.06}, split(near))


def test_longest_paths_are_those_that_a_walk_finds() -> None:
    shape = graph({"a": (), "b": ("a",), "c": ("a",), "d": ("b", "c"), "e": ()})
    until, beyond = longest_path(shape, [{"a": 1.0, "b": 2.0, "c": 5.0, "d": 1.0, "e": 9.0}[n] for n in shape.names])
    at = dict(zip(shape.names, zip(until, beyond, strict=True), strict=True))
    assert at == {"a": (1, 6), "b": (3, 1), "c": (6, 1), "d": (7, 0), "e": (9, 0)}
