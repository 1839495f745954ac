# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about a PyTorch training that is stopped by signals again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from conformance.checks.stopping.holds import Signals, held
from conformance.checks.stopping.timeline import Hold, median
from conformance.clients import launcher
from conformance.clients.launcher import Client
from conformance.host import Host, Unavailable
from conformance.report.model import Row, Verdict, judged

PROGRAM: Final = Path(__file__).resolve().parents[2] / "programs" / "torch_training.py"
SAME: Final = "PyTorch training, stopped and continued: same weights to the last bit"
RESUMES: Final = "PyTorch training: next step after SIGCONT"
STEPS: Final = "PyTorch training: steps that ended while it was stopped"
WHATS: Final = (SAME, RESUMES, STEPS)
_TRAINED_SECONDS: Final = 1.5
_HELD_SECONDS, _BETWEEN_SECONDS = 0.2, 0.15
_LAST_SECONDS: Final = 30.0


def rows(item: str, host: Host) -> Iterator[Row]:
    """The second training is stopped, as often as it lasts."""
    if host.simulated:
        raise Unavailable("PyTorch has no use for the simulated GPU")
    if not host.has("torch"):
        raise Unavailable(f"{host.python} has no torch")
    program = launcher.start(host, [host.python, str(PROGRAM), str(_TRAINED_SECONDS)])
    try:
        holds = _stopped(program)
        record = program.hear(_LAST_SECONDS)
    finally:
        program.end()
    yield from judge(item, record, holds)


def _stopped(program: Client) -> list[Hold]:
    """For nearly as long as the undisturbed one took: the held time comes on top."""
    brake, holds = Signals(program.tgid), []
    ends = time.monotonic() + _TRAINED_SECONDS * 1.5
    while time.monotonic() < ends:
        time.sleep(_BETWEEN_SECONDS)
        holds.append(held(brake, _HELD_SECONDS))
    return holds


def judge(item: str, record: dict[str, Any], holds: list[Hold]) -> Iterator[Row]:
    """From its output. Holds before its first step or after its last one show nothing."""
    times = record["steps_ns"]
    during = [hold for hold in holds if times and times[0] < hold.asked_ns and hold.running_ns < times[-1]]
    free, stopped = record["seconds"]
    note = f"stopped {len(during)} times; {free:.2f} s undisturbed, {stopped:.2f} s with the stops"
    verdict = judged(record["same"]) if during else Verdict.FAILED
    yield Row(item=item, what=SAME, verdict=verdict, figure=record["same"], baseline=True, note=note)
    next_ms = [(min(at for at in times if at > one.released_ns) - one.released_ns) / 1e6 for one in during]
    yield Row(item=item, what=RESUMES, verdict=Verdict.MEASURED, figure=median(next_ms), unit="ms")
    ended = sum(hold.still_ns < at < hold.released_ns for hold in during for at in times)
    yield Row(item=item, what=STEPS, verdict=judged(ended == 0), figure=ended, baseline=0)
