# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Rows about an MPS client that is stopped by a signal while others of its server work."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from conformance.checks.stopping.hold_effects import QUEUED_MS, Repeats, alone_ms, worker_of
from conformance.checks.stopping.holds import Signals, held
from conformance.checks.stopping.timeline import Timeline, latencies_ms, p90
from conformance.clients.launcher import Online
from conformance.host import Host
from conformance.report.model import Row, Verdict, judged

BESIDE: Final = "MPS: p90 of another client beside one that SIGSTOP holds"
SLOWEST: Final = "MPS: slowest request of another client while the held one's queue drains"
DRAINS: Final = "MPS: queued kernels of a stopped client drain"
GOES_ON: Final = "MPS: the stopped client goes on after SIGCONT, results right"
WHATS: Final = (BESIDE, SLOWEST, DRAINS, GOES_ON)
_NOTICED_RATIO, _NOTICED_MS = 1.25, 0.3


def rows(item: str, host: Host, arguments: Sequence[str]) -> Iterator[Row]:
    """With a daemon of its own. `arguments`: of the online workload."""
    with host.mps() as extra:
        alone = alone_ms(host, arguments, Repeats.of(host).seconds, extra)
        yield from _beside(item, host, arguments, extra, alone)


def _beside(
    item: str, host: Host, arguments: Sequence[str], extra: Mapping[str, str], alone: float | None
) -> Iterator[Row]:
    seconds = Repeats.of(host).seconds
    worker = worker_of(host, (), extra)
    try:
        online = Online(host, arguments, extra)
        online.go()
        time.sleep(seconds)
        hold = held(Signals(worker.tgid), seconds + QUEUED_MS / 1000)
        time.sleep(0.2)
        found = online.finish()
        record = worker.finish()
    finally:
        worker.end()
    drained_ns = hold.asked_ns + round(QUEUED_MS * 2e6)  # shared SMs: it may take longer than alone
    before = p90(latencies_ms(found, hold.asked_ns - round(seconds * 1e9), hold.asked_ns))
    beside = p90(latencies_ms(found, drained_ns, hold.released_ns))
    fine = alone is not None and beside is not None and beside <= alone * _NOTICED_RATIO + _NOTICED_MS
    note = f"beside a running one {before:.2f} ms" if before is not None else ""
    yield Row(item=item, what=BESIDE, verdict=judged(fine), figure=beside, unit="ms", baseline=alone, note=note)
    slowest = max(latencies_ms(found, hold.asked_ns, drained_ns), default=None)
    yield Row(item=item, what=SLOWEST, verdict=Verdict.MEASURED, figure=slowest, unit="ms", baseline=before)
    line = Timeline.of(record)
    drain = round(line.drain_ns(hold) / 1e6, 2)
    drains = line.drained(hold) > 0
    yield Row(item=item, what=DRAINS, verdict=judged(drains), figure=drain, unit="ms", baseline=QUEUED_MS)
    right = record["error"] is None and (host.simulated or record["wrong"] == 0) and line.resumed_ns(hold) is not None
    yield Row(item=item, what=GOES_ON, verdict=judged(right), figure=right, baseline=True, note=record["error"] or "")
