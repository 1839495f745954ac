# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about limits: what a later client reaches under them, and that one that runs keeps what it had."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from conformance.checks.mps.stage import Stage, row, staged, window
from conformance.checks.stopping.timeline import Timeline, latencies_ms, p90
from conformance.clients.launcher import Client, Online
from conformance.host import Host, Unavailable
from conformance.report.model import Row, Verdict, judged

if TYPE_CHECKING:
    from enforce.actuators.mps.model import MpsControl, Scope

RATE: Final = "kernel rate of a client that fills the GPU, of that at 100 %: at {percent} %"
PERCENTS: Final = (50, 25)
KEEPS: Final = "a running client keeps its rate when the percentage is set to 25"
SHARES: Final = (*(RATE.format(percent=percent) for percent in PERCENTS), KEEPS)
BEYOND: Final = "error of an allocation beyond the memory limit"
WITHIN: Final = "an allocation within the memory limit"
MEMORY: Final = (BEYOND, WITHIN)
EQUAL: Final = "p90 of a client beside one of equal priority"
BELOW: Final = "p90 of a client beside one of below-normal priority"
PRIORITY: Final = (EQUAL, BELOW)
_FILLS: Final = ("--kernel-us", "500", "--queue", "8")
_WAVES: Final = 8  # blocks for each SM, of which one or two run at a time
_BUSY: Final = ("--kernel-us", "1000", "--waves", "2", "--queue", "8")
_REQUESTS: Final = ("--rate", "60", "--kernels", "5", "--kernel-us", "200", "--blocks", "64", "--seed", "4")
_OFF_RATIO: Final = 0.2  # of what was expected
_LIMIT_MIB, _WITHIN_BYTES, _BEYOND_BYTES = 1024, 1 << 28, 2 << 30
_WARM_SECONDS: Final = 0.1


def shares(host: Host) -> Iterator[Row]:
    """Each client alone on the device; one after the other."""
    with staged(host) as stage:
        control, scope = _scope(stage)
        full, kept, same = _rates(stage, control, scope)
        for percent in PERCENTS:
            _put(control, "percentage", scope, str(percent))
            with stage.steps(*_FILLS, *same) as client:
                seen = client.ready["multiprocessors"]
                rate = _rate(stage, client) / full
            expected = percent / 100
            verdict = judged(abs(rate - expected) <= _OFF_RATIO * expected)
            note = f"{full:.0f} kernels a second at 100 %; the client sees {seen} SMs"
            yield row(RATE.format(percent=percent), verdict, round(rate, 3), "ratio", expected, note)
        yield row(KEEPS, judged(abs(kept - 1) <= _OFF_RATIO), round(kept, 3), "ratio", 1.0)


def _rates(stage: Stage, control: MpsControl, scope: Scope) -> tuple[float, float, tuple[str, ...]]:
    """Of one client at 100 %, what is left of that while new ones would get 25 %, and options for the same kernels.

    A client under a limit sees fewer SMs, and is slower: it is to choose neither its blocks nor its steps itself.
    """
    with stage.steps(*_FILLS, "--waves", str(_WAVES)) as client:
        time.sleep(_WARM_SECONDS)
        before = window(stage.seconds)
        _put(control, "percentage", scope, "25")
        after = window(stage.seconds)
        line = Timeline.of(client.finish())
    full = line.rate(*before)
    if not full:
        raise Unavailable("a client at 100 % got nothing done")
    return full, line.rate(*after) / full, ("--blocks", str(client.ready["blocks"]), *client.pace)


def _rate(stage: Stage, client: Client) -> float:
    time.sleep(_WARM_SECONDS)
    measured = window(stage.seconds)
    return Timeline.of(client.finish()).rate(*measured)


def memory(host: Host) -> Iterator[Row]:
    """1 GiB for all that come."""
    with staged(host) as stage:
        control, scope = _scope(stage)
        _put(control, "memory", scope, f"{_LIMIT_MIB}M")
        error = _allocated(stage, _BEYOND_BYTES)
        expected = "CUDA_ERROR_OUT_OF_MEMORY"
        note = f"2 GiB of {_LIMIT_MIB} MiB"
        yield row(BEYOND, judged(error == expected), error or "none", baseline=expected, note=note)
        error = _allocated(stage, _WITHIN_BYTES)
        yield row(WITHIN, judged(not error), error or "none", baseline="none", note=f"256 MiB of {_LIMIT_MIB} MiB")


def _allocated(stage: Stage, size: int) -> str:
    """The error; "": none."""
    try:
        with stage.holder(size):
            return ""
    except Unavailable as why:
        return str(why).rpartition(": ")[2]


def priority(host: Host) -> Iterator[Row]:
    """The same two clients, with the one that is always busy equal first, then below."""
    with staged(host) as stage:
        control, _ = _scope(stage)
        equal = _beside(stage, control, "0")
        yield row(EQUAL, Verdict.MEASURED if equal else Verdict.FAILED, equal, "ms")
        below = _beside(stage, control, "1")
        fine = below is not None and equal is not None and below < equal
        yield row(BELOW, judged(fine), below, "ms", equal, "a hint to the hardware: lower is what is hoped for")


def _beside(stage: Stage, control: MpsControl, busy: str) -> float | None:
    from enforce.actuators.mps.model import Scope

    _put(control, "priority", Scope(""), busy)
    with stage.steps(*_BUSY) as client:
        _put(control, "priority", Scope(""), "0")
        online = Online(stage.host, (*_REQUESTS, *client.pace), stage.extra)
        online.go()
        since, until_ns = window(stage.seconds * 2)
        return p90(latencies_ms(online.finish(), since, until_ns))


def _scope(stage: Stage) -> tuple[MpsControl, Scope]:
    """Whose new clients the limits are for: the server's."""
    from enforce.actuators.mps.model import Scope

    server, control = stage.server(), stage.control()
    return control, Scope(server.name, "default" if control.protocol == 3 else "")


def _put(control: MpsControl, what: str, scope: Scope, value: str) -> None:
    setting = control.settings(scope, (0,))[what][0]
    control.put(setting, value)
