# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Holding offline processes: by signals, by the freezer, in the kernel at a launch, and under MPS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from gpu.here import Here
from gpu.parts import part
from gpu.row import Row, Verdict, skipped
from gpu.stopping import braking, pausing, training, under_mps
from gpu.stopping.box import boxes
from gpu.stopping.brakes import Brake, Freezer, Signals
from gpu.stopping.braking import Braking, Maker, Repeats

NAME: Final = "stopping"
TITLE: Final = "holding a process: what drains, what comes back, what others notice"
SECONDS: Final = 90
LEAST_SECONDS: Final = 65
SIGNALS, FREEZER_2, FREEZER_1 = BRAKES = ("SIGSTOP", "cgroup freezer v2", "cgroup freezer v1")
ALONE: Final = "p90 of the online workload alone"
WHAT: Final = (ALONE, *braking.WHATS, *training.WHATS, *pausing.WHATS, *under_mps.WHATS)


def rows(here: Here) -> Iterator[Row]:
    """What is rarest last: there may be no time left for it."""
    pace = braking.pace(here)
    online = (*braking.ONLINE, *pace)
    alone_ms = braking.alone_ms(here, online, Repeats.of(here).seconds)
    yield Row(item=NAME, what=ALONE, verdict=Verdict.MEASURED, figure=alone_ms, unit="ms")
    brakes = _brakes(here, online, alone_ms)
    for one in brakes[:2]:
        yield from part(NAME, one.whats(), one.rows)
    yield from part(NAME, training.WHATS, lambda: training.rows(NAME, here))
    yield from part(NAME, under_mps.WHATS, lambda: under_mps.rows(NAME, here, online))
    yield from part(NAME, pausing.WHATS, lambda: pausing.rows(NAME, here, pace))
    if here.quick:
        yield from (skipped(NAME, what, "left out with --quick") for what in brakes[2].whats())
    else:
        yield from part(NAME, brakes[2].whats(), brakes[2].rows)


def _brakes(here: Here, online: Sequence[str], alone_ms: float | None) -> list[Braking]:
    makers: dict[str, Maker] = {SIGNALS: _signals, FREEZER_2: lambda: _freezer(2), FREEZER_1: lambda: _freezer(1)}
    return [Braking(NAME, name, here, make, online, alone_ms) for name, make in makers.items()]


@contextmanager
def _signals() -> Iterator[tuple[Sequence[str], Callable[[int], Brake]]]:
    yield (), Signals


@contextmanager
def _freezer(version: int) -> Iterator[tuple[Sequence[str], Callable[[int], Brake]]]:
    with boxes(version, ["offline"]) as made:
        from enforce.freezer import Cgroup, Place

        box = made["offline"]
        with Cgroup(Place.of(version, str(box.folder))) as cgroup:
            yield box.entering, lambda _: Freezer(cgroup)
