# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is made of the functions that a framework called, and of what it reports that it did."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from agent.probes.symbols import SYMBOLS
from conformance.checks import lists
from conformance.checks.frameworks import (
    WHAT,
    Framework,
    _begin,
    _of_phase,
    _ready,
    frameworks,
    other_libcuda,
    phase_rows,
    workload_made,
)
from conformance.checks.probes.hits import (
    KINDS,
    Hits,
    between,
    counted,
    graph_changes,
    kind_of,
    recounts,
    unprobed,
    watched,
)
from conformance.clients.json_client import JsonClient, NoAnswerError
from conformance.host import Host
from conformance.report.model import Row, Verdict

PROGRAMS = Path(__file__).parents[4] / "conformance" / "programs"


def by_what(rows: Iterator[Row]) -> dict[str, Row]:
    return {row.what: row for row in rows}


def host(folder: Path) -> Host:
    return Host(
        simulated=True,
        quick=True,
        folder=folder,
        libcuda=None,
        libnvml=None,
        workloads=folder,
        bpf_objects=folder,
        bpf=None,
        python=sys.executable,
        environment={},
    )


@dataclass(slots=True)
class Readings:
    """Plays the counting probes."""

    readings: list[dict[str, int]] = field(default_factory=list)

    def read(self) -> dict[str, int]:
        return self.readings.pop(0)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """One that answers as the real ones do."""
    path = tmp_path / "program.py"
    path.write_text(
        f"import sys; sys.path.insert(0, {str(PROGRAMS)!r})\n"
        "from calls_protocol import own_stdout, serve\n"
        "answers = own_stdout()\n"
        "print('a framework says something')\n"
        "def broken(): raise ValueError('no such thing')\n"
        "serve(answers, {'version': '1'}, {'kernels': lambda: {'launches': 5},"
        " 'kernels, profiled': lambda: {'launches': 7}, 'unseen': lambda: {}, 'broken': broken})\n"
    )
    return path


def test_every_probed_symbol_that_launches_or_moves_memory_has_a_kind() -> None:
    kinds = {symbol.name: kind_of(symbol.name) for symbol in SYMBOLS}
    assert kinds["cuLaunchKernelEx_ptsz"] == "launches"
    assert kinds["cuLaunchCooperativeKernelMultiDevice"] == "launches"
    assert kinds["cuGraphLaunch_ptsz"] == "graph launches"
    assert kinds["cuMemsetD8Async"] == "memsets"
    assert kinds["cuMemcpyDtoH_v2"] == "copies"
    assert kinds["cuMemCreate"] == "allocations"
    assert kinds["cuMemRelease"] == "frees"
    assert kinds["cuEventSynchronize"] == "waits"
    assert kinds["cuStreamQuery"] is None
    assert kind_of("cuLaunchHostFunc") is None


def test_hits_are_summed_by_kind() -> None:
    found = counted({"cuLaunchKernel": 3, "cuLaunchKernelEx": 4, "cuGraphLaunch": 5, "cuCtxSetCurrent": 9})
    assert found["launches"] == 7
    assert found["graph launches"] == 5
    assert sum(found.values()) == 12


def test_what_may_matter_and_has_no_probe_is_distinguished_from_what_does_not_matter() -> None:
    hits = {
        "cuLaunchKernel": 1,
        "cuGraphAddNode_v3": 2,
        "cuGraphExecNodeSetParams_v2": 3,
        "cuLaunchHostFunc": 4,
        "cuGraphGetNodes": 5,
        "cuMemAddressReserve": 6,
        "cuCtxGetCurrent": 7,
    }
    assert unprobed(hits) == {"cuGraphAddNode_v3": 2}
    assert graph_changes(hits) == {"cuGraphExecNodeSetParams_v2": 3}


@pytest.mark.parametrize(
    ("name", "changes", "another_number"),
    [
        ("cuGraphExecUpdate_v2", False, False),
        ("cuGraphExecKernelNodeSetParams_v2", False, False),  # probed, as all that are known
        ("cuGraphNodeSetEnabled", False, False),
        ("cuGraphExecKernelNodeSetParams_v3", True, False),
        ("cuGraphDestroyNode_v2", True, True),
        ("cuGraphConditionalHandleCreate", True, True),
        ("cuGraphKernelNodeGetParams_v2", False, False),
        ("cuGraphKernelNodeSetAttribute", False, False),
        ("cuGraphExecHostNodeSetParams", False, False),
        ("cuGraphExecEventWaitNodeSetEvent", False, False),
        ("cuGraphNodeGetEnabled", False, False),
        ("cuGraphNodeFindInClone", False, False),
        ("cuGraphicsMapResources", False, False),
        ("cuGraphAddDependencies_v2", False, False),
        ("cuGraphAddBatchMemOpNode", False, False),
        ("cuGraphLaunch", False, False),
    ],
)
def test_what_changes_a_graph_is_distinguished_from_what_is_not_counted(
    name: str, changes: bool, another_number: bool
) -> None:
    assert unprobed({name: 1}) == {}
    assert (graph_changes({name: 1}) == {name: 1}) is changes
    assert recounts(name) is another_number


def test_of_two_names_of_one_function_the_probed_one_is_watched() -> None:
    exports = {"cuAnotherLaunch": 1, "cuLaunchKernel": 1, "cuMemFutureAlloc": 2, "cuInit": 3}
    assert watched(exports) == {1: "cuLaunchKernel", 2: "cuMemFutureAlloc"}


def test_only_what_grew_was_called() -> None:
    assert between({"a": 1, "b": 2}, {"a": 1, "b": 5, "c": 1}) == {"b": 3, "c": 1}


def test_launches_have_to_be_counted_exactly_and_copies_at_least() -> None:
    seen = {"cuLaunchKernel": 99, "cuMemcpyAsync": 12, "cuStreamSynchronize": 1}
    rows = by_what(phase_rows("it", seen, {"launches": 100, "copies": 10, "waits": 2}))
    launches = rows["it: launches counted per launch made"]
    assert (launches.verdict, launches.figure) == (Verdict.DIFFERS, 0.99)
    assert rows["it: copies counted per copy made"].verdict is Verdict.OK
    assert rows["it: waits counted per wait made"].verdict is Verdict.DIFFERS
    assert rows["it: launch functions called"].figure == "cuLaunchKernel 99"
    assert rows["it: functions called that no probe is on"].verdict is Verdict.OK
    too_many = by_what(phase_rows("it", {"cuLaunchKernel": 200}, {"launches": 100}))
    assert too_many["it: launches counted per launch made"].verdict is Verdict.DIFFERS


def test_a_launch_function_without_a_probe_is_a_difference() -> None:
    rows = by_what(phase_rows("it", {"cuLaunchKernelFuture": 5}, {"launches": 5}))
    row = rows["it: functions called that no probe is on"]
    assert (row.verdict, row.figure) == (Verdict.DIFFERS, "cuLaunchKernelFuture 5")
    assert rows["it: launches counted per launch made"].figure == 0.0
    assert rows["it: launch functions called"].figure == "none"


def test_a_graph_that_changes_after_it_was_counted_is_reported() -> None:
    what = "it: functions called that change what a graph was counted to hold"
    launched = {"cuGraphLaunch": 5}
    assert what not in by_what(phase_rows("it", {"cuLaunchKernel": 5}, {"launches": 5}))
    assert by_what(phase_rows("it", launched, {}))[what].verdict is Verdict.OK
    resized = by_what(phase_rows("it", {**launched, "cuGraphExecNodeSetParams_v2": 4}, {}))
    assert (resized[what].verdict, resized[what].figure) == (Verdict.MEASURED, "cuGraphExecNodeSetParams_v2 4")
    assert resized["it: functions called that no probe is on"].verdict is Verdict.OK
    assert "cuGraphExecNodeSetParams_v2" not in resized["it: functions called that no probe is on"].note
    both = by_what(phase_rows("it", {**launched, "cuGraphExecNodeSetParams_v2": 4, "cuGraphNodeSetEnabled_v2": 1}, {}))
    assert both[what].verdict is Verdict.DIFFERS


def test_what_a_workload_did_is_worked_out_of_its_summary() -> None:
    offline = {"program": "offline", "steps": 3, "kernels": 60}
    assert workload_made(offline, ["--kernels", "20"])["launches"] == 60
    graphs = workload_made({**offline, "kernels": 300}, ["--kernels", "20", "--graph", "5"])
    assert (graphs["launches"], graphs["graph launches"]) == (5, 60)
    online = {"program": "online", "requests": 4}
    assert workload_made(online, ["--kernels", "10"]) == {"launches": 40, "waits": 4}
    assert workload_made(online, ["--kernels", "10", "--graph"])["graph launches"] == 4


def test_a_phase_is_judged_by_what_the_profiler_saw(tmp_path: Path, program: Path) -> None:
    hits = Readings([{"cuInit": 1}, {"cuInit": 1, "cuLaunchKernel": 7}])
    with JsonClient(host(tmp_path), "it", [sys.executable, str(program)]) as talk:
        greeting = talk.hear_json(30)
        assert greeting["about"] == {"version": "1"}
        rows = by_what(_of_phase("it", ("kernels", "kernels, profiled"), talk, cast(Hits, hits)))
    row = rows["it: launches counted per launch made"]
    assert (row.verdict, row.note) == (Verdict.OK, "7 counted, 7 made; made: as CUPTI saw it")


def test_a_profiler_that_sees_nothing_leaves_the_programs_own_count(tmp_path: Path, program: Path) -> None:
    hits = Readings([{}, {"cuLaunchKernel": 5}])
    with JsonClient(host(tmp_path), "it", [sys.executable, str(program)]) as talk:
        talk.hear_json(30)
        rows = by_what(_of_phase("it", ("kernels", "unseen"), talk, cast(Hits, hits)))
    row = rows["it: launches counted per launch made"]
    assert row.note == "5 counted, 5 made; CUPTI saw nothing"


def test_without_a_profiler_launches_of_unknown_number_are_skipped(tmp_path: Path, program: Path) -> None:
    hits = Readings([{}, {"cuLaunchKernel": 5}])
    with JsonClient(host(tmp_path), "it", [sys.executable, str(program)]) as talk:
        talk.hear_json(30)
        rows = by_what(_of_phase("it", ("unseen", "unseen"), talk, cast(Hits, hits)))
    row = rows["it: launches counted per launch made"]
    assert (row.verdict, row.note) == (Verdict.SKIPPED, "CUPTI saw nothing")


@pytest.mark.parametrize(
    ("words", "verdict"),
    [
        ("RuntimeError: Failed to find C compiler. Please specify via CC environment variable.", Verdict.SKIPPED),
        ("RuntimeError: CuPy failed to load libnvrtc.so.13: OSError: libnvrtc.so.13: cannot open", Verdict.SKIPPED),
        ("RuntimeError: an illegal memory access was encountered", Verdict.FAILED),
    ],
)
def test_a_framework_that_lacks_its_compiler_is_skipped(tmp_path: Path, words: str, verdict: Verdict) -> None:
    (framework,) = [one for one in frameworks() if one.name == "Triton"]
    command = [sys.executable, "-c", f"import sys; sys.exit({words!r})"]
    with JsonClient(host(tmp_path), "it", command) as talk:
        row = _ready(framework, talk, time.monotonic() + 30)
    assert isinstance(row, Row)
    assert (row.what, row.verdict) == ("Triton", verdict)
    assert words in row.note


def test_what_frameworks_compile_stays_in_the_items_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.checks.frameworks.PROGRAMS", tmp_path)
    (tmp_path / "it.py").write_text(
        "import json, os\n"
        "print(json.dumps({name: value for name, value in os.environ.items() if name.endswith('_CACHE_DIR')}))\n"
    )
    with ExitStack() as stack:
        talk = _begin(host(tmp_path), Framework("It", "json", ("it.py",), {}, {}), stack)
        assert isinstance(talk, JsonClient)
        answer = talk.hear_json(30)
    assert {name: Path(answer[name]).parent for name in ("TRITON_CACHE_DIR", "CUPY_CACHE_DIR")} == {
        "TRITON_CACHE_DIR": tmp_path,
        "CUPY_CACHE_DIR": tmp_path,
    }


def test_a_phase_that_breaks_is_a_failed_row_and_the_program_goes_on(tmp_path: Path, program: Path) -> None:
    with JsonClient(host(tmp_path), "it", [sys.executable, str(program)]) as talk:
        talk.hear_json(30)
        (row,) = _of_phase("it", ("broken",), talk, cast(Hits, Readings([{}, {}])))
        assert (row.verdict, row.note) == (Verdict.FAILED, "ValueError: no such thing")
        assert talk.ask("kernels", 30) == {"did": {"launches": 5}}


def test_a_program_that_ends_is_reported_with_its_last_line(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('libcudnn is missing', file=sys.stderr)"]
    with JsonClient(host(tmp_path), "it", command) as talk, pytest.raises(NoAnswerError, match="libcudnn is missing"):
        talk.hear_json(30)


def test_a_program_that_prints_nothing_is_not_waited_for(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with JsonClient(host(tmp_path), "it", command) as talk, pytest.raises(NoAnswerError, match="nothing within"):
        talk.ask("kernels", 0.2)


def test_what_is_no_json_is_reported(tmp_path: Path) -> None:
    with (
        JsonClient(host(tmp_path), "it", ["echo", "hello"]) as talk,
        pytest.raises(NoAnswerError, match="no JSON: hello"),
    ):
        talk.hear_json(30)


def test_every_row_is_one_that_the_item_declares(tmp_path: Path) -> None:
    made = dict.fromkeys(KINDS, 1)
    seen = {"cuLaunchKernel": 1, "cuMemAlloc_v2": 1, "cuGraphExecNodeSetParams": 1}
    for row in phase_rows("PyTorch, eager", seen, made):
        assert any(lists(pattern, row.what) for pattern in WHAT if pattern != "{framework}"), row.what


def test_a_process_with_another_driver_library_is_distinguished_from_one_with_this(tmp_path: Path) -> None:
    mapped, another = tmp_path / "libcuda.so.1", tmp_path / "libcuda.so.2"
    for path in (mapped, another):
        path.write_bytes(bytes(4096))
    program = (
        "import mmap, sys; file = open(sys.argv[1], 'rb'); "
        "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE); "
        "print('{}', flush=True); input()"
    )
    with JsonClient(host(tmp_path), "it", [sys.executable, "-c", program, str(mapped)]) as talk:
        talk.hear_json(30)
        assert other_libcuda(talk.process.pid, mapped) == ""
        assert other_libcuda(talk.process.pid, another) == str(mapped)
    assert other_libcuda(talk.process.pid, another) == ""


def test_each_framework_is_a_program_that_there_is() -> None:
    names = [one.name for one in frameworks()]
    assert len(names) == len(set(names))
    for one in frameworks():
        assert (PROGRAMS / one.command[0]).is_file()
        assert json.dumps(dict(one.extra))
