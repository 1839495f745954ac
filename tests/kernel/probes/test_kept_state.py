# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the next agent knows of processes that run, and what it does not believe."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.core.model import ProcessId
from agent.node import preflight
from agent.node.procfs import Procfs, this_boot
from agent.probes.abi import DEVICE_UNKNOWN
from agent.probes.kept_state import KeptState, Names
from agent.probes.libcuda import LibcudaProbes
from tests.support.programs.driver import Driven, Driver, kernels, launched, lost

GRAPH = ("kernel:5", "kernel:7", "child:3", "make", "launch")  # 4 kernels
OF_ONE_LAUNCH = 4


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """What agents keep."""
    return tmp_path / "known.json"


@contextmanager
def agent(driver: Driver, file: Path) -> Iterator[tuple[LibcudaProbes, KeptState, Names]]:
    """An agent's probes, and what it took over before they were attached."""
    with LibcudaProbes(preflight.bpf_object(), Procfs()) as probes:
        kept = KeptState(probes.bpf, file, Procfs())
        names = kept.take_over()
        assert not probes.ensure(str(driver.libcuda)).failed
        yield probes, kept, names


def known_before(driver: Driver, file: Path, program: Driven, names: Names | None = None) -> None:
    """An agent sees the program's first part, and ends."""
    with agent(driver, file) as (probes, kept, _):
        program.begin()
        program.finish()
        assert kernels(probes, program.process) == OF_ONE_LAUNCH
        kept.save(names or {})


def counted_after(driver: Driver, file: Path, program: Driven) -> tuple[set[int], int, dict[str, int]]:
    """Another one sees the next part: on which devices, how many kernels, and what is lost."""
    with agent(driver, file) as (probes, _, _):
        program.begin()
        program.finish()
        devices = {device for device, _ in launched(probes, program.process)}
        return devices, kernels(probes, program.process), lost(probes)


def changed(file: Path, **values: Any) -> None:
    """Other words in the file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_a_graph_and_a_context_from_before_an_agent_are_known_to_it(graphs: Driver, file: Path) -> None:
    with graphs.start(*GRAPH, "await", "launch", "launch") as program:
        known_before(graphs, file, program)
        assert counted_after(graphs, file, program) == ({0}, 2 * OF_ONE_LAUNCH, {})


def test_without_the_file_they_are_not(graphs: Driver, file: Path) -> None:
    with graphs.start(*GRAPH, "await", "launch", "launch") as program:
        known_before(graphs, file, program)
        file.unlink()
        assert counted_after(graphs, file, program) == ({DEVICE_UNKNOWN}, 2, {"graph": 2})


def test_a_node_that_is_changed_after_the_restart_changes_its_graph(graphs: Driver, file: Path) -> None:
    with graphs.start(*GRAPH, "await", "off:0", "launch") as program:
        known_before(graphs, file, program)
        assert counted_after(graphs, file, program) == ({0}, OF_ONE_LAUNCH - 1, {})


def test_another_program_in_the_same_process_is_a_stranger(graphs: Driver, file: Path) -> None:
    with graphs.start(*GRAPH, "await", "exec", "kernel:1", "make", "launch") as program:
        known_before(graphs, file, program)
        before = json.loads(file.read_text())
        program.begin()
        program = program.again()
        with agent(graphs, file) as (probes, kept, _):
            kept.save({})
            after = json.loads(file.read_text())
            program.begin()
            program.finish()
            assert kernels(probes, program.process) == 1
        assert [of["entries"] for of in before["maps"].values()].count([]) < len(before["maps"])
        assert all(of["entries"] == [] for of in after["maps"].values())


def test_another_program_that_the_next_agent_sees_begin_is_a_stranger_though_the_old_one_called_nothing(
    graphs: Driver, file: Path
) -> None:
    with graphs.start(*GRAPH, "await", "exec", "kernel:1", "make", "launch") as program:
        known_before(graphs, file, program)
        with agent(graphs, file) as (probes, kept, _):
            program.begin()
            program = program.again()
            kept.save({})
            after = json.loads(file.read_text())
            program.begin()
            program.finish()
            assert kernels(probes, program.process) == 1
        assert all(of["entries"] == [] for name, of in after["maps"].items() if name != "tenant_of")


def test_a_process_that_has_ended_leaves_nothing_and_one_with_its_pid_has_nothing_of_it(
    graphs: Driver, file: Path
) -> None:
    with graphs.start(*GRAPH, "await") as program:
        known_before(graphs, file, program)
        mine = ProcessId(os.getpid(), 1)
        changed(file, processes=[[mine.tgid, mine.start_ticks, 0], *json.loads(file.read_text())["processes"]])
    with agent(graphs, file) as (_, kept, names):
        kept.save({})
        assert names == {}
    assert all(of["entries"] == [] for of in json.loads(file.read_text())["maps"].values())


def test_names_of_functions_are_of_those_that_run_still(graphs: Driver, file: Path) -> None:
    gone = ProcessId(1 << 22, 7)
    with graphs.start(*GRAPH, "await") as program:
        mine: Names = {program.process: {0x10: "sgemm", 0x20: "ключ", 0x30: "sgemm"}}
        known_before(graphs, file, program, {**mine, gone: {0x10: "sgemm"}})
        with agent(graphs, file) as (_, _, names):
            assert names == mine


def test_what_says_something_else_is_not_believed(
    graphs: Driver, file: Path, fresh_probes: LibcudaProbes, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptState(fresh_probes.bpf, file, Procfs())
    with graphs.start(*GRAPH, "await") as program:
        known_before(graphs, file, program, {program.process: {0x10: "sgemm"}})
        right = file.read_text()
        graph = {"layout": {}, "entries": [["00", "00"]]}
        wrong: list[dict[str, Any]] = [{"boot": "another"}, {"maps": 7}, {"processes": [[1, 2]]}, {"texts": []}]
        for values in wrong:
            file.write_text(json.dumps(json.loads(right) | values | {"maps": values.get("maps", {"graphs": graph})}))
            assert kept.take_over() == {}, values
        kept.save({})
    assert "another version" in caplog.text
    assert all(of["entries"] == [] for of in json.loads(file.read_text())["maps"].values())


def test_what_is_no_such_file_is_reported(
    file: Path, fresh_probes: LibcudaProbes, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptState(fresh_probes.bpf, file, Procfs())
    for text in (b"", b"{", b"[" * 5000, b"[]", b"null", b"{}", b"\xff", b'{"boot": "%s"}' % this_boot().encode()):
        caplog.clear()
        file.write_bytes(text)
        with caplog.at_level(logging.WARNING):
            assert kept.take_over() == {}
        assert "cannot be used" in caplog.text, text


def test_threads_that_came_later_with_the_number_of_one_that_ended_have_no_context_of_it(
    graphs: Driver, file: Path
) -> None:
    with graphs.start(*GRAPH, "await", "launch") as program:
        known_before(graphs, file, program)
        changed(file, at_ticks=1)  # every thread is younger
        assert counted_after(graphs, file, program) == ({DEVICE_UNKNOWN}, OF_ONE_LAUNCH, {})


def test_the_file_is_for_root_and_replaced_whole(file: Path, fresh_probes: LibcudaProbes) -> None:
    left = file.with_name("known.json.new")
    left.write_text("of one that was killed while it wrote")
    KeptState(fresh_probes.bpf, file, Procfs()).save({})
    assert file.stat().st_mode & 0o777 == 0o600
    assert not left.exists()
