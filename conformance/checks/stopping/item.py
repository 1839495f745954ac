# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Holding offline processes: by signals, by the freezer, in the kernel at a launch, and under MPS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from conformance.checks.stopping import hold_effects, launch_holds, training, under_mps
from conformance.checks.stopping.cgroups import control_groups
from conformance.checks.stopping.hold_effects import HoldMethod, Maker, Repeats
from conformance.checks.stopping.holds import Freezer, HoldTarget, Signals
from conformance.host import Host
from conformance.report.model import Row, Verdict, part, skipped

NAME: Final = "stopping"
TITLE: Final = "holding a process: what drains, what comes back, what others notice"
SECONDS: Final = 90
LEAST_SECONDS: Final = 60
SIGNALS, FREEZER_2, FREEZER_1 = ("SIGSTOP", "cgroup freezer v2", "cgroup freezer v1")
ALONE: Final = "p90 of the online workload alone"
WHAT: Final = (ALONE, *hold_effects.WHATS, *training.WHATS, *launch_holds.WHATS, *under_mps.WHATS)


def rows(host: Host) -> Iterator[Row]:
    """Rows of all parts, the rarest last: there may be no time left for it."""
    pace = hold_effects.pace(host)
    online = (*hold_effects.ONLINE, *pace)
    alone_ms = hold_effects.alone_ms(host, online, Repeats.of(host).seconds)
    yield Row(item=NAME, what=ALONE, verdict=Verdict.MEASURED, figure=alone_ms, unit="ms")
    brakes = _brakes(host, online, alone_ms)
    for one in brakes[:2]:
        yield from part(NAME, one.whats(), one.rows)
    yield from part(NAME, training.WHATS, lambda: training.rows(NAME, host))
    yield from part(NAME, under_mps.WHATS, lambda: under_mps.rows(NAME, host, online))
    yield from part(NAME, launch_holds.WHATS, lambda: launch_holds.rows(NAME, host, pace))
    if host.quick:
        yield from (skipped(NAME, what, "left out with --quick") for what in brakes[2].whats())
    else:
        yield from part(NAME, brakes[2].whats(), brakes[2].rows)


def _brakes(host: Host, online: Sequence[str], alone_ms: float | None) -> list[HoldMethod]:
    makers: dict[str, Maker] = {SIGNALS: _signals, FREEZER_2: lambda: _freezer(2), FREEZER_1: lambda: _freezer(1)}
    return [HoldMethod(NAME, name, host, make, online, alone_ms) for name, make in makers.items()]


@contextmanager
def _signals() -> Iterator[tuple[Sequence[str], Callable[[int], HoldTarget]]]:
    yield (), Signals


@contextmanager
def _freezer(version: int) -> Iterator[tuple[Sequence[str], Callable[[int], HoldTarget]]]:
    with control_groups(version, ["offline"]) as made:
        from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup

        box = made["offline"]
        with Cgroup(FreezerCgroup.of(version, str(box.folder))) as cgroup:
            yield box.entering, lambda _: Freezer(cgroup)
