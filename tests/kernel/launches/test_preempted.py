# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Threads that take the CPU from others amid a probe, and meet the same probe there.

Where the kernel is preemptible and each program has a stack for each CPU (Linux 6.13), that ended in an oops
(bpf/probe.bpf.h).
"""

from __future__ import annotations

import os

from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driven, Driver, launched, lost, run_together

_THREADS, _LAUNCHES, _WAITS = 8, 250, 60_000
_LAUNCH = "launch:1x1x1:32x1x1"
_OFTEN = [f"{_WAITS}*sync", _LAUNCH]  # hardly ever outside a probe
_NOW_AND_THEN = ["idle:1", _LAUNCH, "sync"] * _LAUNCHES


def _on_one_cpu(driven: Driven, *, first: bool) -> None:
    """All of its threads on the same CPU. `first`: they take it from others as soon as they want it."""
    tgid = driven.process.tgid
    os.sched_setaffinity(tgid, {min(os.sched_getaffinity(0))})
    if first:
        os.sched_setscheduler(tgid, os.SCHED_FIFO, os.sched_param(1))


def test_each_launch_is_counted_once_and_no_thread_sees_what_another_one_had_in_hand(
    driver: Driver, own_probes: LibcudaProbes
) -> None:
    with driver.start("threads=2", *_OFTEN) as often, driver.start(f"threads={_THREADS}", *_NOW_AND_THEN) as first:
        _on_one_cpu(often, first=False)
        _on_one_cpu(first, first=True)
        run_together([often, first])
        for driven, count in ((often, 2), (first, _THREADS * _LAUNCHES)):
            assert launched(own_probes, driven.process) == {(0, driven.function(0)): (count, count, 32)}
    assert not lost(own_probes)
