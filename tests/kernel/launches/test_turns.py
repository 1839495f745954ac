# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Requests of periodic processes take turns on a device: in the kernel's own probes, with the guardian or without."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from agent.core.model import ProcessId
from agent.node.pidfd import PidfdCache, resume_process
from agent.node.procfs import Procfs
from agent.probes.abi import (
    ORDINALS,
    PAUSE_FREE,
    PAUSE_STOPPED,
    PAUSE_TURN,
    ROLE_PERIODIC,
    SLOT_NONE,
    SLOTS,
    Gate,
    Pause,
    Periodic,
    ProcessKey,
    Rule,
    Wake,
)
from agent.probes.libbpf import RingBuffer
from agent.probes.libcuda import LibcudaProbes
from enforce.actuators.launch.resume import ResumeSchedule
from tests.support.programs.driver import Driven, Driver
from tools.harness.wait import until

MS = 1_000_000
FOR_EVER = 1 << 63
SLOT = 5
LAUNCH = "launch:1x1x1:32x1x1"
LONG = "launch:1x1x1:32x1x1:0:3000000000"  # three seconds: whoever comes meanwhile finds it running
REQUEST = (LAUNCH, "sync")


@pytest.fixture
def turns(own_probes: LibcudaProbes) -> Iterator[Any]:
    """Free before; the lease holds for ever."""
    found = own_probes.map("turns").share(SLOTS)
    found[SLOT].owner = found[SLOT].waiting = 0
    control = own_probes.map("controls").share(1)[0]
    control.lease_until_ns = FOR_EVER
    records(own_probes)
    yield found
    control.lease_until_ns = 0


def periodic(probes: LibcudaProbes, driven: Driven, deadline_ns: int = 10_000 * MS) -> ProcessKey:
    """Gives it the rule of a periodic process on its first device."""
    rule = Rule(role=ROLE_PERIODIC, deadline_ns=deadline_ns, max_pause_ns=10_000 * MS, slot_unknown=SLOT_NONE)
    rule.slots[:] = [SLOT, *[SLOT_NONE] * (ORDINALS - 1)]
    key = ProcessKey.of(driven.process)
    probes.map("rules").put(key, rule)
    return key


def records(probes: LibcudaProbes) -> list[tuple[int, int]]:
    """(kind, slot) of what waits in the ring for the guardian."""
    found: list[Wake] = []
    read: Callable[[bytes], None] = lambda data: found.append(Wake.from_buffer_copy(data))  # noqa: E731
    ring = RingBuffer(probes.bpf.lib, probes.bpf.map_fd("pauses"), read)
    ring.consume()
    ring.close()
    return [(wake.kind, wake.slot) for wake in found]


def owner(driven: Driven) -> int:
    return driven.process.start_ticks << 32 | driven.process.tgid


def is_stopped(driven: Driven) -> bool:
    return Procfs().stat(driven.process.tgid).state == "T"


def is_done(driven: Driven) -> bool:
    return bool(select.select([driven.stdout], [], [], 0)[0])


def begin_and_hold(driver: Driver, probes: LibcudaProbes, stack: ExitStack, turns: Any) -> Driven:
    """A periodic process in a long request."""
    first = stack.enter_context(driver.start(LONG, "sync"))
    periodic(probes, first)
    first.begin()
    until(lambda: turns[SLOT].owner == owner(first), "the first turn", step_seconds=0.001)
    return first


def stopped_behind(driver: Driver, probes: LibcudaProbes, stack: ExitStack, deadline_ns: int) -> Driven:
    """Another one, which is stopped at its first launch."""
    driven = stack.enter_context(driver.start(*REQUEST))
    periodic(probes, driven, deadline_ns)
    driven.begin()
    until(lambda: is_stopped(driven), "the stop", step_seconds=0.001)
    return driven


def counted(probes: LibcudaProbes, driven: Driven) -> Periodic:
    found: Periodic | None = probes.map("periodics").get(ProcessKey.of(driven.process))
    assert found is not None
    return found


def test_a_request_that_finds_the_device_free_has_the_turn_until_a_wait_drains_it(
    driver: Driver, own_probes: LibcudaProbes, turns: Any
) -> None:
    with driver.start(f"3*{LAUNCH}", "sync", *REQUEST) as driven:
        key = periodic(own_probes, driven)
        driven.begin()
        driven.finish()
        found, pace = counted(own_probes, driven), own_probes.map("paces").get(key)
    assert (found.requests, found.misses, found.served) == (2, 0, 2)
    assert all(0 < found.served_ns[number] < 60_000 * MS for number in range(2))
    assert pace is not None
    assert pace.pauses == 0
    assert turns[SLOT].owner == 0


def test_a_request_that_begins_while_another_one_runs_is_stopped_and_says_its_deadline(
    driver: Driver, own_probes: LibcudaProbes, turns: Any
) -> None:
    with ExitStack() as stack:
        first = begin_and_hold(driver, own_probes, stack, turns)
        second = stopped_behind(driver, own_probes, stack, 700 * MS)
        stop: Pause | None = own_probes.map("stops").get(ProcessKey.of(second.process))
        assert stop is not None
        assert (stop.reason, stop.slot) == (PAUSE_TURN, SLOT)
        assert 0 < stop.due_ns - 700 * MS <= stop.at_ns
        assert (PAUSE_STOPPED, SLOT) in records(own_probes)
        turns[SLOT].waiting = 1
        first.finish()
        assert (PAUSE_FREE, SLOT) in records(own_probes)
        os.kill(second.process.tgid, signal.SIGCONT)
        second.finish()


def test_a_request_does_not_overtake_those_that_wait(driver: Driver, own_probes: LibcudaProbes, turns: Any) -> None:
    turns[SLOT].waiting = 1
    with ExitStack() as stack:
        driven = stopped_behind(driver, own_probes, stack, 700 * MS)
        turns[SLOT].waiting = 0
        os.kill(driven.process.tgid, signal.SIGCONT)
        driven.finish()


def test_the_earlier_deadline_runs_first_when_the_request_before_has_ended(
    driver: Driver, own_probes: LibcudaProbes, turns: Any
) -> None:
    schedule = ResumeSchedule([Gate() for _ in range(SLOTS)], 20 * MS, 0, turns=turns)
    order: list[ProcessId] = []
    pidfds = PidfdCache(Procfs())

    def resumed() -> int:
        for due in schedule.due(FOR_EVER >> 8):
            own_probes.map("stops").delete(ProcessKey.of(due.stop.process))
            resume_process(pidfds, due.stop.process)
            order.append(due.stop.process)
        return len(order)

    with ExitStack() as stack:
        first = begin_and_hold(driver, own_probes, stack, turns)
        later = stopped_behind(driver, own_probes, stack, 9_000 * MS)
        earlier = stopped_behind(driver, own_probes, stack, 5_000 * MS)
        for driven in (later, earlier):
            pause: Pause | None = own_probes.map("stops").get(ProcessKey.of(driven.process))
            assert pause is not None
            pause.rule.max_pause_ns = FOR_EVER >> 4
            schedule.add(pause)
        turns[SLOT].until_ns = FOR_EVER  # of the one that runs: nothing but its end frees the device
        assert resumed() == 0
        first.finish()
        until(lambda: resumed() == 1, "the next turn", step_seconds=0.001)
        earlier.finish()
        until(lambda: resumed() == 2, "the turn after it", step_seconds=0.001)
        later.finish()
    assert order == [earlier.process, later.process]
    pidfds.drop_all()


def test_only_a_request_that_begins_is_ever_stopped(driver: Driver, own_probes: LibcudaProbes, turns: Any) -> None:
    with driver.start(LAUNCH, "idle:100", f"20*{LAUNCH}", "sync") as driven:
        key = periodic(own_probes, driven)
        driven.begin()
        until(lambda: turns[SLOT].owner == owner(driven), "its turn", step_seconds=0.001)
        turns[SLOT].owner, turns[SLOT].waiting = 1, 1  # the guardian gave it to another one
        driven.finish()
        pace = own_probes.map("paces").get(key)
        turns[SLOT].owner = turns[SLOT].waiting = 0
    assert pace is not None
    assert pace.pauses == 0


def test_a_late_request_is_counted_with_how_late_it_was(driver: Driver, own_probes: LibcudaProbes, turns: Any) -> None:
    with driver.start(LAUNCH, "idle:50", "sync", *REQUEST) as driven:
        periodic(own_probes, driven, 20 * MS)
        driven.begin()
        driven.finish()
        found = counted(own_probes, driven)
    assert found.requests == 2
    assert found.misses >= 1
    assert found.worst_late_ns >= 30 * MS


def test_a_process_that_dies_in_its_turn_leaves_it_to_others(
    driver: Driver, own_probes: LibcudaProbes, turns: Any
) -> None:
    with ExitStack() as stack:
        first = begin_and_hold(driver, own_probes, stack, turns)
        turns[SLOT].waiting = 1
        records(own_probes)
        first.kill()
        until(lambda: turns[SLOT].owner == 0, "the turn to be free", step_seconds=0.001)
        until(lambda: (PAUSE_FREE, SLOT) in records(own_probes), "the record", step_seconds=0.001)


def test_a_process_that_dies_while_it_waits_leaves_no_stop_behind(
    driver: Driver, own_probes: LibcudaProbes, turns: Any
) -> None:
    with ExitStack() as stack:
        begin_and_hold(driver, own_probes, stack, turns)
        second = stopped_behind(driver, own_probes, stack, 700 * MS)
        key = ProcessKey.of(second.process)
        second.kill()
        until(lambda: own_probes.map("stops").get(key) is None, "its stop to be forgotten", step_seconds=0.001)


def test_nothing_waits_for_a_turn_without_a_lease(driver: Driver, own_probes: LibcudaProbes, turns: Any) -> None:
    own_probes.map("controls").share(1)[0].lease_until_ns = 0
    turns[SLOT].owner, turns[SLOT].until_ns = 1, FOR_EVER
    with driver.start(*REQUEST) as driven:
        periodic(own_probes, driven)
        driven.begin()
        driven.finish()
    turns[SLOT].owner = 0


def test_offline_processes_find_the_gate_shut_while_a_periodic_request_runs(
    driver: Driver, own_probes: LibcudaProbes, turns: Any
) -> None:
    gate = own_probes.map("gates").share(SLOTS)[SLOT]
    with ExitStack() as stack:
        first = begin_and_hold(driver, own_probes, stack, turns)
        until(lambda: (gate.open, gate.in_wait) == (1, 1), "the request at the gate", step_seconds=0.001)
        first.finish()
    assert (gate.open, gate.in_wait) == (0, 0)
