# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What every signal promises, whatever it reads: the same cases for all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.core.model import ContainerKey
from enforce.model import Reading
from enforce.signals.registry import BUILTIN
from tests.kernel.signals.signal_stages import MS, STAGES, Stage
from tests.support.programs.timed import Took
from tools.harness.wait import until

CHAT, OTHER = ContainerKey("runc:chat"), ContainerKey("runc:other")
MINUTE_NS, SHORT_NS = 60_000 * MS, 2_000 * MS
FEW = 20


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """One for each signal."""
    with ExitStack() as stack:
        yield STAGES[request.param](tmp_path, stack)


def read(stage: Stage, container: ContainerKey = CHAT, window_ns: int = MINUTE_NS) -> Reading | None:
    return stage.read(container, stage.slo(container, window_ns, FEW))


def settled(stage: Stage, took: list[Took], container: ContainerKey = CHAT) -> Reading:
    """The reading with these requests in its window, and no others: as it stays when it is looked at again."""
    until(
        lambda: (found := read(stage, container)) is not None and found.samples >= len(took),
        "all requests in the window",
    )
    for _ in range(3):
        found = read(stage, container)
        assert found is not None
        assert found.samples == len(took)
    assert found is not None
    return found


def check_median(found: Reading, took: list[Took]) -> None:
    assert found.latency_ns is not None
    least, most = (sorted(values)[(len(took) - 1) // 2] for values in zip(*took, strict=True))
    assert least * 0.97 <= found.latency_ns <= most * 1.03


def test_each_signal_has_a_stage() -> None:
    assert set(STAGES) == {signal.name for signal in BUILTIN}


def test_without_requests_nothing_is_known(stage: Stage) -> None:
    stage.start(CHAT)
    for _ in range(5):
        assert read(stage) is None


def test_a_container_that_is_not_there_has_no_reading(stage: Stage) -> None:
    assert stage.read(OTHER, stage.slo(OTHER, MINUTE_NS, FEW)) is None


def test_too_few_requests_give_no_reading_and_one_more_does(stage: Stage) -> None:
    service = stage.start(CHAT)
    took = service.answer(FEW - 1, 1)
    low = stage.slo(CHAT, MINUTE_NS, 1)
    until(
        lambda: (found := stage.read(CHAT, low)) is not None and found.samples == FEW - 1, "the requests in the window"
    )
    assert read(stage) is None
    settled(stage, [*took, *service.answer(1, 1)])


def test_known_latencies_give_their_quantile_within_three_percent(stage: Stage) -> None:
    service = stage.start(CHAT)
    took = [*service.answer(10, 2), *service.answer(21, 12), *service.answer(2, 40)]
    check_median(settled(stage, took), took)


def test_a_signal_that_goes_silent_has_no_reading_after_the_window_and_comes_back(stage: Stage) -> None:
    service = stage.start(CHAT)
    read(stage, CHAT, SHORT_NS)
    for _ in range(2):
        until(lambda: bool(service.answer(FEW, 1)) and read(stage, CHAT, SHORT_NS) is not None, "a reading")
        until(lambda: read(stage, CHAT, SHORT_NS) is None, "no reading, once the window is over")


def test_a_service_that_restarts_loses_and_invents_no_request(stage: Stage) -> None:
    service = stage.start(CHAT)
    took = service.answer(30, 3)
    settled(stage, took)
    service.end()
    settled(stage, took)
    took = [*took, *stage.start(CHAT).answer(31, 9)]
    check_median(settled(stage, took), took)


def test_processes_of_one_container_add_up(stage: Stage) -> None:
    services = [stage.start(CHAT), stage.start(CHAT)]
    took = [one for service in services for one in service.answer(FEW, 5)]
    check_median(settled(stage, took), took)


def test_requests_of_another_container_do_not_count(stage: Stage) -> None:
    ours, theirs = stage.start(CHAT), stage.start(OTHER)
    others = theirs.answer(FEW + 7, 20)
    took = ours.answer(FEW, 4)
    check_median(settled(stage, took), took)
    check_median(settled(stage, others, OTHER), others)


def test_what_is_forgotten_restarts_from_zero(stage: Stage) -> None:
    service = stage.start(CHAT)
    settled(stage, service.answer(FEW, 2))
    stage.signal.forget([CHAT])
    assert read(stage) is None
