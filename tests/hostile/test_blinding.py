# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One tenant that fills the kernel's maps: others are counted as if it were not there, and its losses are its own."""

from __future__ import annotations

import ctypes
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.collectors.tenants import Tenants
from agent.containers.gpu_processes import ProcessEvent
from agent.core.model import ProcessId
from agent.node import preflight
from agent.node.procfs import Procfs
from agent.probes.events import EventReader, FunctionNames
from agent.probes.libcuda import LibcudaProbes
from tests.hostile.programs import compile_program, pretended_libcuda
from tests.support.programs.driver import launched
from tools.harness.containers import Container, Mount
from tools.harness.wait import until

Start = Callable[..., ProcessId]
COPIES = 3
WITHOUT_END = 100  # times five seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the program, and a libcuda.so.1 of the tenant's own."""
    folder = tmp_path_factory.mktemp("crowd")
    library = pretended_libcuda(folder)
    for number in range(COPIES):
        shutil.copy(library, f"{library}.{number}")
    compile_program("crowd", folder)
    return folder


@pytest.fixture
def tenants(folder: Path) -> Iterator[tuple[LibcudaProbes, Tenants]]:
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        for library in folder.glob("libcuda.so.1*"):
            assert not probes.ensure(str(library)).failed
        tenants = Tenants(probes)
        tenants.collect(0)
        yield probes, tenants


@pytest.fixture
def start(folder: Path, tenants: tuple[LibcudaProbes, Tenants]) -> Iterator[Start]:
    """Runs the program in a container of its own until all is done; the budgets are written every 0.5 s meanwhile.

    Of one that does not end: returns when it has begun.
    """
    token = uuid.uuid4().hex[:8]
    with ExitStack() as stack:

        def started(name: str, *what: str, within: str = "", ends: bool = True) -> ProcessId:
            output = folder / f"{name}-{token}.out"
            container = Container.start(
                f"{name}-{token}",
                [str(folder / "crowd"), *what],
                {"LD_LIBRARY_PATH": str(folder)},
                cgroup_path=f"/gpuwarden-e2e/{within or name}-{token}" + (f"/{name}" if within else ""),
                mounts=[Mount(folder)],
                output=output,
                state=folder / "containers",
            )
            stack.callback(container.stop)

            def done() -> bool:
                tenants[1].collect(0)
                time.sleep(0.5)
                return output.read_text() == "done\n"

            if ends:
                until(done, f"{what} to be done", 120)
            return Procfs().process_id(container.tgid)

        yield started


@pytest.mark.parametrize("what", ["functions", "contexts", "threads", "processes"])
def test_who_fills_a_map_fills_its_own_part_and_another_is_counted_exactly(
    tenants: tuple[LibcudaProbes, Tenants], start: Start, what: str
) -> None:
    probes, budgets = tenants
    attacker = start("attacker", "functions", *([] if what == "functions" else [what]))
    victim = start("victim", "work")
    assert launched(probes, victim) == {(0, 32): (50, 50, 1)}
    assert not launched(probes, victim, "other_launches")
    assert len(launched(probes, attacker)) <= 65536 // 4 + 64  # what comes between reading a credit and writing it
    budgets.collect(0)
    lost = budgets.lost[budgets.owners[attacker]]
    kept = len(launched(probes, attacker))
    assert lost["launch_function"] >= 65600 - kept
    if what == "threads":
        assert lost["thread"] >= 5000 - 16384 // 4
    assert budgets.owners[victim] not in budgets.lost


def test_cgroups_that_a_container_makes_share_its_budget(tenants: tuple[LibcudaProbes, Tenants], start: Start) -> None:
    _, budgets = tenants
    first = start("first", "functions", within="parent")
    second = start("second", "functions", within="parent")
    budgets.collect(0)
    assert budgets.owners[first] == budgets.owners[second]
    assert budgets.lost[budgets.owners[first]]["launch_function"] >= 2 * 65600 - 65536 // 4 - 64  # as above


def test_a_tenant_of_more_processes_than_have_a_place_fills_no_more_with_the_rest(
    tenants: tuple[LibcudaProbes, Tenants], start: Start
) -> None:
    probes, budgets = tenants
    start("attacker", "sleepers", "five")
    victim = start("victim", "work")
    assert launched(probes, victim) == {(0, 32): (50, 50, 1)}
    of_others = sum(key.process.tgid != victim.tgid for key, _ in probes.map("launches").items())
    assert of_others <= 65536 // 4 + 64
    budgets.collect(0)
    assert budgets.owners[victim] not in budgets.lost


def test_events_of_one_tenant_drive_out_no_other_ones(tenants: tuple[LibcudaProbes, Tenants], start: Start) -> None:
    probes, budgets = tenants
    recorded = probes.bpf.map("recorded_events", ctypes.c_uint64 * 2, ctypes.c_uint8 * 32)
    victim = start("victim", "event")
    attacker = start("attacker", "events")

    def held(process: ProcessId) -> int:
        return sum(key[0] & 0xFFFFFFFF == process.tgid for key, _ in recorded.items())

    assert held(victim) == 1
    assert held(attacker) <= 16384 // 4
    budgets.collect(0)
    assert budgets.lost[budgets.owners[attacker]]["record"] > 0
    assert budgets.owners[victim] not in budgets.lost


def test_handles_that_are_ended_again_cost_no_credit(tenants: tuple[LibcudaProbes, Tenants], start: Start) -> None:
    process = start("honest", "graphs")
    tenants[1].collect(0)
    assert tenants[1].owners[process] not in tenants[1].lost


def test_a_program_that_maps_copies_of_its_library_in_turns_hides_no_launch(
    tenants: tuple[LibcudaProbes, Tenants], start: Start
) -> None:
    assert launched(tenants[0], start("attacker", "turns")) == {(0xFFFFFFFF, 64): (300, 300, 1)}


class Newcomers:
    """Notes which processes were seen."""

    def __init__(self) -> None:
        self.tgids = set[int]()

    def seen(self, event: ProcessEvent) -> None:
        self.tgids.add(event.process.tgid)

    def exited(self, process: ProcessId) -> None: ...

    def replaced(self, process: ProcessId) -> None: ...


def test_a_newcomer_is_seen_while_another_tenant_invents_names(
    tenants: tuple[LibcudaProbes, Tenants], start: Start
) -> None:
    newcomers = Newcomers()
    reader = EventReader(tenants[0], newcomers, FunctionNames())
    reader.start()
    try:
        attacker = start("attacker", *["names"] * WITHOUT_END, ends=False)
        until(lambda: attacker.tgid in newcomers.tgids, "the attacker")
        victim = start("victim", "work")
        until(lambda: victim.tgid in newcomers.tgids, "the victim")
    finally:
        reader.stop()
