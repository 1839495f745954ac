# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about another client of the GPU while a process is locked, saved and restored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from conformance.checks.checkpoint.stage import Stage, must_call, row
from conformance.checks.stopping.hold_effects import ONLINE
from conformance.checks.stopping.timeline import latencies_ms
from conformance.clients.launcher import Online
from conformance.report.model import Row, Verdict, judged

SLOWEST: Final = "slowest request of another client while a process is {act}"
ACTS: Final = {"locked": "lock {} 5000", "saved": "checkpoint {}", "restored": "restore {}", "unlocked": "unlock {}"}
STAYS: Final = "another client goes on: requests during all of it"
WHATS: Final = (*(SLOWEST.format(act=act) for act in ACTS), STAYS)
_BEFORE_SECONDS: Final = 0.02  # requests that began shortly before an act meet it too


def rows(stage: Stage) -> Iterator[Row]:
    """Each act once, with a pause behind it."""
    seconds = 0.3 if stage.host.quick else 1.0
    with stage.holder(stage.less_bytes) as holder, stage.calls() as calls:
        online = Online(stage.host, ONLINE)
        online.go()
        begun = time.monotonic_ns()
        time.sleep(seconds)
        acts = {}
        for name, command in ACTS.items():
            since = time.monotonic_ns()
            must_call(calls, command.format(holder.tgid), 60.0)
            acts[name] = since, time.monotonic_ns()
            time.sleep(seconds / 4)
        ended = time.monotonic_ns()
        found = online.finish()
    alone = max(latencies_ms(found, begun, begun + round(seconds * 1e9)), default=None)
    for name, (since, until_ns) in acts.items():
        met = latencies_ms(found, since - round(_BEFORE_SECONDS * 1e9), until_ns)
        took = f"{(until_ns - since) / 1e6:.1f} ms for {stage.less_bytes >> 20} MiB"
        note = f"it took {took}; the baseline is the slowest before"
        slowest = max(met, default=None)
        yield row(SLOWEST.format(act=name), Verdict.MEASURED, slowest, "ms", alone, note)
    served = len(latencies_ms(found, begun, ended))
    expected = round((ended - begun) / 1e9 * 100)
    yield row(STAYS, judged(served > expected // 2), served, baseline=expected)
