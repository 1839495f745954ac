# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Processes that fork, exec, lose threads and change contexts: what they did stays theirs, and only theirs."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from agent.containers.gpu_processes import ProcessEvent
from agent.core.device_ordinals import bus_place
from agent.core.model import ProcessId
from agent.node.procfs import Procfs
from agent.probes.abi import ORDINALS, ROLE_ONLINE, U32, Gate, ProcessKey, Rule
from agent.probes.events import EventReader, FunctionNames
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driven, Driver, launched, lost, memory
from tools.harness.wait import until

MIB = 1 << 20
SLOT = 3  # of a gate that nothing else here uses
LAUNCH = "launch:1x1x1:32x1x1"


class ThreadKey(ctypes.Structure):
    """bpf_get_current_pid_tgid()."""

    _fields_ = [("tid", ctypes.c_uint32), ("tgid", ctypes.c_uint32)]


class HandleKey(ctypes.Structure):
    """struct graph_key."""

    _fields_ = [("process", ProcessKey), ("handle", ctypes.c_uint64)]


@dataclass(slots=True)
class Heard:
    """The events of processes, in order."""

    words: list[tuple[str, ProcessId]] = field(default_factory=list)
    environments: dict[ProcessId, Mapping[str, str] | None] = field(default_factory=dict)

    def seen(self, event: ProcessEvent) -> None:
        self.environments[event.process] = event.environment
        self.words.append(("seen", event.process))

    def exited(self, process: ProcessId) -> None:
        self.words.append(("exited", process))

    def replaced(self, process: ProcessId) -> None:
        self.words.append(("replaced", process))

    def of(self, driven: Driven) -> list[str]:
        """About one process."""
        return [word for word, process in self.words if process == driven.process]

    def until_over(self, driven: Driven) -> list[str]:
        """The same, once its end is known."""
        until(lambda: "exited" in self.of(driven), f"the end of {driven.process}")
        return self.of(driven)


@pytest.fixture
def heard(probes: LibcudaProbes) -> Iterator[Heard]:
    """Of every process on the probed library."""
    listener = Heard()
    reader = EventReader(probes, listener, FunctionNames())
    reader.start()
    yield listener
    reader.stop()


def counts(probes: LibcudaProbes, driven: Driven) -> dict[tuple[int, int], int]:
    """(device, kernel) → launches."""
    names = {driven.function(kernel, device): kernel for device in (0, 1) for kernel in range(8)}
    found = launched(probes, driven.process)
    return {(device, names[function]): launches for (device, function), (launches, _, _) in found.items()}


@contextmanager
def become(first: Driven) -> Iterator[Driven]:
    """Runs the first program, and the one that it execs, until that is done."""
    first.begin()
    second = first.again()
    second.begin()
    second.finish()
    yield second


# One piece of a variable is 255 bytes: what a long one's second piece begins with is not the name of another.
INSIDE = {"AAA_FIRST": "x" * (255 - len("AAA_FIRST=")) + "CUDA_VISIBLE_DEVICES=0"}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, {}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"CUDA_VISIBLE_DEVICES": "1"}),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        ({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "MY_CUDA_VISIBLE_DEVICES": "1"}, {}),
        (INSIDE, {}),
        ({**INSIDE, "CUDA_VISIBLE_DEVICES": "1,0"}, {"CUDA_VISIBLE_DEVICES": "1,0"}),
        ({f"VARIABLE_{number}": "x" * 500 for number in range(1000)}, {}),
        ({"CUDA_VISIBLE_DEVICES": "0" + ",-1" * 300}, None),
        ({f"V{number}": "x" for number in range(5000)}, None),
    ],
    ids=["unset", "set", "order", "other", "inside", "behind it", "500 kB", "too long", "too many"],
)
def test_the_environment_of_a_process_is_known_at_its_first_call(
    driver: Driver, heard: Heard, variables: Mapping[str, str], found: Mapping[str, str] | None
) -> None:
    with driver.start(LAUNCH, **variables) as driven:
        driven.begin()
        driven.finish()
    assert heard.until_over(driven) == ["seen", "exited"]
    assert heard.environments[driven.process] == found


def test_who_asks_hears_at_once_of_a_process_that_is_gone(driver: Driver, probes: LibcudaProbes) -> None:
    heard = Heard()
    reader = EventReader(probes, heard, FunctionNames())  # its thread is not started
    driven = driver.run(LAUNCH)
    reader.drain()
    assert heard.of(driven) == ["seen", "exited"]
    reader.stop()


def test_a_fork_changes_nothing_for_its_parent_and_adds_no_process(
    driver: Driver, probes: LibcudaProbes, heard: Heard
) -> None:
    with driver.start(f"alloc:{2 * MIB}", f"3*{LAUNCH}", "5*fork", f"7*{LAUNCH}:2") as driven:
        driven.begin()
        driven.finish()
        assert counts(probes, driven) == {(0, 0): 3, (0, 2): 7}
        assert memory(probes, driven.process)[0].live == {"plain": 2 * MIB}
    assert heard.until_over(driven) == ["seen", "exited"]
    assert {process for _, process in heard.words if process.start_ticks >= driven.process.start_ticks} == {
        driven.process
    }


@pytest.mark.parametrize("threads", [0, 1], ids=["by its first thread", "by another thread"])
def test_another_program_in_the_process_does_not_inherit_memory(
    driver: Driver, probes: LibcudaProbes, heard: Heard, threads: int
) -> None:
    old, new = f"alloc:{6 * MIB}", f"alloc:{4 * MIB}"
    operations = (old, f"3*{LAUNCH}", "exec", f"threads={threads}", new, f"5*{LAUNCH}")
    with driver.start(f"threads={threads}", *operations) as first, become(first) as second:
        assert second.process == first.process
        assert memory(probes, second.process)[0].live == {"plain": 4 * MIB}
        assert sum(count for count, _, _ in launched(probes, second.process).values()) == 3 + 5
    assert heard.until_over(second) == ["seen", "replaced", "seen", "exited"]


def test_another_program_in_the_process_has_contexts_and_devices_of_its_own(
    driver: Driver, probes: LibcudaProbes
) -> None:
    before = ("uuid:0", "uuid:1", "new:1", LAUNCH, "exec", "threads=0")
    with driver.start("threads=0", *before, f"3*{LAUNCH}", "uuid:0", f"alloc:{MIB}") as first, become(first) as second:
        reported = {key.ordinal for key, _ in probes.map("uuids").items() if key.process.id() == second.process}
        assert reported == {0}
        assert (0, second.function(0)) in launched(probes, second.process)
        assert memory(probes, second.process)[0].live == {"plain": MIB}


def test_another_program_in_the_process_has_graphs_and_captures_of_its_own(
    driver: Driver, probes: LibcudaProbes
) -> None:
    before = ("capture_begin:1", "capture_end:1", "capture_begin:2", "exec", "threads=0", f"3*{LAUNCH}")
    with driver.start("threads=0", *before) as first, become(first) as second:
        for name in ("graphs", "captures"):
            items = probes.bpf.map(name, HandleKey, ctypes.c_byte * 1024).items()
            assert [key.handle for key, _ in items if key.process.id() == second.process] == []


def test_a_capture_that_another_thread_ended_is_over(driver: Driver, probes: LibcudaProbes) -> None:
    ended = ("capture_begin:1", "1+capture_end:1")
    others = ("1+capture_begin:2", f"{LAUNCH}:1:1000:2", "1+capture_end:2")
    assert counts(probes, driver.run("threads=0", *ended, *others, f"3*{LAUNCH}")) == {(0, 0): 3}


def test_a_process_whose_first_thread_ended_is_alive(driver: Driver, probes: LibcudaProbes, heard: Heard) -> None:
    with driver.start("leader=leaves", f"alloc:{MIB}", f"3*{LAUNCH}") as driven:
        driven.begin()
        driven.finish()
        assert Procfs().is_alive(driven.process)
        assert counts(probes, driven) == {(0, 0): 3}
        assert memory(probes, driven.process)[0].live == {"plain": MIB}
    assert heard.until_over(driven) == ["seen", "exited"]


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed at work"])
def test_threads_leave_nothing_behind_them(driver: Driver, probes: LibcudaProbes, heard: Heard, killed: bool) -> None:
    work = ("set:1", f"{1_000_000 if killed else 3}*{LAUNCH}", "sync")
    with driver.start("threads=16", f"alloc:{MIB}", *work) as driven:
        driven.begin()
        if killed:
            while len(threads_of(probes, driven)) < 16:
                assert Procfs().is_alive(driven.process)
            driven.kill()
        else:
            driven.finish()
            assert counts(probes, driven) == {(1, 0): 48}
            assert memory(probes, driven.process)[0].live == {"plain": 16 * MIB}
    assert heard.until_over(driven) == ["seen", "exited"]
    assert threads_of(probes, driven) == []


def test_an_online_process_that_dies_at_work_does_not_keep_its_gate_shut(driver: Driver, probes: LibcudaProbes) -> None:
    slots = (ctypes.c_uint8 * ORDINALS)(*[SLOT] * ORDINALS)
    with driver.start("threads=6", "set:1", "launch:1x1x1:32x1x1:0:300000000000", "sync") as driven:
        probes.map("rules").put(ProcessKey.of(driven.process), Rule(role=ROLE_ONLINE, slots=slots, slot_unknown=SLOT))
        found_free = gate(probes).requests
        driven.begin()
        until(lambda: (gate(probes).open, gate(probes).in_wait) == (6, 6), "all threads to wait")
        assert 1 <= gate(probes).requests - found_free < 6  # one, and one more for each that a stall made count as over
        driven.kill()
    until(lambda: (gate(probes).open, gate(probes).in_wait) == (0, 0), "the gate to be free")
    probes.map("rules").delete(ProcessKey.of(driven.process))
    assert gate(probes).busy_since_ns == 0
    assert gate(probes).busy_total_ns > 0


def test_each_request_that_found_the_device_free_ended_a_gap(driver: Driver, probes: LibcudaProbes) -> None:
    slots = (ctypes.c_uint8 * ORDINALS)(*[SLOT] * ORDINALS)
    with driver.start("set:0", f"4*{LAUNCH}", "sync", f"2*{LAUNCH}", "sync", LAUNCH, "sync") as driven:
        probes.map("rules").put(ProcessKey.of(driven.process), Rule(role=ROLE_ONLINE, slots=slots, slot_unknown=SLOT))
        found_free = gate(probes).requests
        driven.begin()
        driven.finish()
    probes.map("rules").delete(ProcessKey.of(driven.process))
    assert gate(probes).requests >= found_free + 3  # more only where a stall made one count as over


def gate(probes: LibcudaProbes) -> Gate:
    found = probes.map("gates").get(U32(SLOT))
    assert isinstance(found, Gate)
    return found


def threads_of(probes: LibcudaProbes, driven: Driven) -> list[int]:
    """The threads of the process that the kernel side knows."""
    items = probes.bpf.map("context_stacks", ThreadKey, ctypes.c_byte * 136).items()
    return [key.tid for key, _ in items if key.tgid == driven.process.tgid]


def test_the_end_of_a_context_frees_what_it_held_and_nothing_else(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run(f"alloc:{2 * MIB}", "new:1", f"3*alloc:{4 * MIB}", "destroy", f"alloc:{6 * MIB}", LAUNCH)
    totals = memory(probes, driven.process)
    assert {device: dict(one.live) for device, one in totals.items()} == {0: {"plain": 8 * MIB}, 1: {}}
    assert totals[1].peak == 12 * MIB
    assert counts(probes, driven) == {(0, 0): 1}  # what was current before is so again


def test_a_primary_context_ends_when_as_often_released_as_retained(driver: Driver, probes: LibcudaProbes) -> None:
    on_1 = ("set:1", f"alloc:{2 * MIB}", "retain_primary:1", "release_primary:1")
    kept = driver.run(*on_1, f"3*{LAUNCH}")
    assert memory(probes, kept.process)[1].live == {"plain": 2 * MIB}
    assert counts(probes, kept) == {(1, 0): 3}
    released = driver.run(*on_1, "set:0", "release_primary:1", f"5*{LAUNCH}")
    assert memory(probes, released.process)[1].live == {}
    assert counts(probes, released) == {(0, 0): 5}
    retained = driver.run(*on_1, "set:0", "release_primary:1", "retain_primary:1", "set:1", f"alloc:{MIB}")
    assert memory(probes, retained.process)[1].live == {"plain": MIB}


def test_contexts_are_pushed_and_popped_over_two_devices(driver: Driver, probes: LibcudaProbes) -> None:
    driven = driver.run("new:1", LAUNCH, "new:0", f"2*{LAUNCH}", "push:1", f"4*{LAUNCH}", "pop", "pop", f"8*{LAUNCH}")
    assert counts(probes, driven) == {(1, 0): 1 + 4 + 8, (0, 0): 2}


def test_the_driver_tells_which_device_an_ordinal_is_when_they_are_reordered(
    driver: Driver, probes: LibcudaProbes
) -> None:
    straight = uuids(probes, driver, "0,1")
    swapped = uuids(probes, driver, "1,0")
    assert set(straight) == set(swapped) == {0, 1}
    assert straight[0] == swapped[1] != straight[1]
    assert straight[1] == swapped[0]


def test_the_driver_tells_which_device_is_at_a_place_on_the_bus(driver: Driver, probes: LibcudaProbes) -> None:
    straight, swapped = bus_ids(probes, driver, "0,1"), bus_ids(probes, driver, "1,0")
    assert set(straight) == set(swapped) == {0, 1}
    assert straight[0] == swapped[1] != straight[1]
    assert all(bus_place(text.decode()) for text in straight.values())


def bus_ids(probes: LibcudaProbes, driver: Driver, visible: str) -> dict[int, bytes]:
    """Ordinal → place, as reported to one process."""
    with driver.start("bus:0", "bus:1", CUDA_VISIBLE_DEVICES=visible) as driven:
        driven.begin()
        driven.finish()
        items = probes.map("bus_ids").items()
        return {key.ordinal: value.text for key, value in items if key.process.id() == driven.process}


def uuids(probes: LibcudaProbes, driver: Driver, visible: str) -> dict[int, bytes]:
    """Ordinal → UUID, as reported to one process."""
    with driver.start("uuid:0", "uuid:1", CUDA_VISIBLE_DEVICES=visible) as driven:
        driven.begin()
        driven.finish()
        items = probes.map("uuids").items()
        return {key.ordinal: bytes(value.bytes) for key, value in items if key.process.id() == driven.process}


def test_nothing_was_lost(probes: LibcudaProbes) -> None:
    assert not lost(probes)
