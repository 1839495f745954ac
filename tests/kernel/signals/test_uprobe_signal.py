# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The signal `uprobe` on real programs: which calls count, for how long, and what is never done to a program."""

from __future__ import annotations

import ctypes as c
import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from agent.core.errors import ProbeError
from agent.core.model import ContainerKey
from agent.node.elf_functions import function_offset
from agent.probes import abi
from agent.probes.libbpf import BpfObject
from agent.probes.libraries import FileId
from enforce.policy.model import UprobeSource
from enforce.signals.uprobe import TALLIES, UprobeProbes, Watched
from tests.support.programs.timed import OBJECT, Timing, Took, compile_timed, start, timing
from tools.harness.wait import until

CHAT, OTHER = ContainerKey("runc:chat"), ContainerKey("runc:other")
REQUEST = "handle_request"


@pytest.fixture(scope="module")
def timed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """timed.c, compiled."""
    return compile_timed(tmp_path_factory.mktemp("timed"))


@pytest.fixture
def watching(timed: Path) -> Iterator[Timing]:
    """Of its requests."""
    with timing(UprobeSource(str(timed), symbol=REQUEST)) as made:
        yield made


def probes_of(watching: Timing) -> UprobeProbes:
    """The kernel side, which is loaded."""
    probes = watching.signal.follower._kernel.probes
    assert isinstance(probes, UprobeProbes)
    return probes


def check_median(watching: Timing, took: list[Took], container: ContainerKey = CHAT) -> None:
    """That exactly these calls are in the window, with their median."""
    until(lambda: watching.samples(container) >= len(took), "all calls in the window")
    reading = watching.read(container)
    assert reading is not None
    assert reading.samples == len(took)
    assert reading.latency_ns is not None
    least, most = (sorted(values)[(len(took) - 1) // 2] for values in zip(*took, strict=True))
    assert least * 0.97 <= reading.latency_ns <= most * 1.03


def test_a_call_takes_from_its_beginning_to_its_return(watching: Timing, timed: Path) -> None:
    with start(timed) as program:
        watching.follow(CHAT, program.process)
        took = [*program.do("call", 20, 1000), *program.do("call", 21, 8000)]
        program.do("other", 5, 100)
        check_median(watching, took)


def test_of_a_recursion_the_outermost_call_counts(watching: Timing, timed: Path) -> None:
    with start(timed) as program:
        watching.follow(CHAT, program.process)
        check_median(watching, program.do("call", 9, 1000, depth=4))


def test_threads_do_not_mix_up_their_calls(watching: Timing, timed: Path) -> None:
    with start(timed) as program:
        watching.follow(CHAT, program.process)
        program.do("thread", 5, 100)
        until(lambda: watching.samples(CHAT) == 10, "the calls of both threads")


def test_calls_that_never_return_are_left_out_and_counted(watching: Timing, timed: Path) -> None:
    with start(timed) as program:
        watching.follow(CHAT, program.process)
        program.do("jump", 4, 100)
        check_median(watching, program.do("call", 7, 3000))
        assert watching.signal.losses()["uprobe:abandoned"] == 4


def test_threads_that_end_inside_leave_nothing_behind(timed: Path) -> None:
    with timing(UprobeSource(str(timed), symbol="handle_last", nothrow=True)) as watching, start(timed) as program:
        watching.follow(CHAT, program.process)
        program.do("exit_inside", 5, 100)
        probes = probes_of(watching)
        insides = probes._bpf.map("insides", c.c_uint64, c.c_uint64 * 3)
        assert [key.value for key, _ in insides.items() if key.value >> 32 == program.process.tgid] == []
        assert watching.samples(CHAT) == 0


def test_a_function_is_found_by_its_offset_too(timed: Path) -> None:
    offset = function_offset(str(timed), REQUEST, None, nothrow=False)
    with timing(UprobeSource(str(timed), offset=offset)) as watching, start(timed) as program:
        watching.follow(CHAT, program.process)
        check_median(watching, program.do("call", 5, 1000))


def test_a_file_that_is_taken_for_two_counts_once(timed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count()
    monkeypatch.setattr("agent.probes.libraries.real_file", lambda *_: FileId(0, next(numbers)))
    with timing(UprobeSource(str(timed), symbol=REQUEST)) as watching, start(timed) as one, start(timed) as other:
        watching.follow(CHAT, one.process)
        watching.follow(OTHER, other.process)
        probes = probes_of(watching)
        assert len(probes._targets) == 2
        took = [program.do("call", 11, 1000) for program in (one, other)]
        check_median(watching, took[0], CHAT)
        check_median(watching, took[1], OTHER)


def test_two_functions_of_one_file_are_timed_apart(watching: Timing, timed: Path) -> None:
    other = UprobeSource(str(timed), symbol="handle_other")
    with timing(other) as second, start(timed) as program:
        watching.follow(CHAT, program.process)
        second.follow(CHAT, program.process)
        requests, others = program.do("call", 5, 1000), program.do("other", 9, 4000)
        check_median(watching, requests)
        check_median(second, others)


def test_a_program_that_is_not_wanted_any_more_has_no_probe(watching: Timing, timed: Path) -> None:
    with start(timed) as program:
        watching.follow(CHAT, program.process)
        probes = probes_of(watching)
        assert probes._targets
        watching.signal.forget([CHAT])
        watching.signal.follower.wake()
        until(lambda: not probes._targets, "the probes to be gone")
        assert list(probes._wanted.items()) == []
        assert list(probes._recorded.items()) == []


def test_a_program_that_is_written_over_loses_its_probes_and_gets_new_ones(timed: Path, tmp_path: Path) -> None:
    program_path = tmp_path / "program"
    shutil.copy(timed, program_path)
    with timing(UprobeSource(str(program_path), symbol=REQUEST)) as watching:
        with start(program_path) as program:
            watching.follow(CHAT, program.process)
        probes = probes_of(watching)
        with program_path.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            file.write(b"more")
        until(lambda: not probes._targets, "the probes to be gone")
        with start(program_path) as program:
            watching.follow(CHAT, program.process)
            check_median(watching, program.do("call", 5, 1000))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (UprobeSource("/nowhere/at/all", symbol=REQUEST), "write slo.binary as the container sees it"),
        (UprobeSource("/etc/passwd", symbol=REQUEST), "not an ELF program"),
        (UprobeSource("/dev/null", symbol=REQUEST), "not a regular file"),
    ],
)
def test_what_cannot_be_timed_is_reported_and_counted(timed: Path, source: UprobeSource, expected: str) -> None:
    with timing(source) as watching, start(timed) as program:
        watching.members[CHAT] = {program.process}
        assert watching.read(CHAT) is None
        until(lambda: expected in str(watching.signal.trouble(CHAT)), "the trouble")
        assert sum(watching.signal.failures().values()) >= 1
        assert watching.read(CHAT) is None


def test_a_function_that_is_not_there_is_timed_once_it_is(timed: Path, tmp_path: Path) -> None:
    place = tmp_path / "server"
    with timing(UprobeSource(str(place), symbol=REQUEST)) as watching, start(timed) as program:
        watching.members[CHAT] = {program.process}
        watching.read(CHAT)
        until(lambda: "server" in str(watching.signal.trouble(CHAT)), "the trouble")
        place.hardlink_to(timed) if place.parent.stat().st_dev == timed.stat().st_dev else place.symlink_to(timed)
        until(lambda: watching.signal.trouble(CHAT) is None, "no trouble")
        watching.read(CHAT)
        check_median(watching, program.do("call", 5, 1000))


CLEANS_UP = """
void handle(void (*callee)(void));
static void clean(int *here) { *(volatile int *)here = 1; }
void handle(void (*callee)(void)) { int here __attribute__((cleanup(clean))) = 0; callee(); (void)here; }
int main(void) { return 0; }
"""


def test_a_program_that_can_throw_is_not_touched_unless_the_policy_allows_it(tmp_path: Path) -> None:
    (tmp_path / "throws.c").write_text(CLEANS_UP)
    program = tmp_path / "throws"
    options = ["-O1", "-fexceptions", "-rdynamic"]  # as in C++, what is thrown through it runs what cleans up
    subprocess.run(["gcc", *options, tmp_path / "throws.c", "-o", program], check=True)
    for stripped in (False, True):
        if stripped:
            subprocess.run(["strip", "--strip-all", program], check=True)
        with pytest.raises(ProbeError, match="write nothrow: true"):
            function_offset(str(program), "handle", None, nothrow=False)
        assert function_offset(str(program), "handle", None, nothrow=True) > 0


def test_a_go_program_is_never_touched(tmp_path: Path) -> None:
    (tmp_path / "go.c").write_text(
        'char info[16] __attribute__((section(".go.buildinfo"))) = "go";\nint main(void) {}\n'
    )
    program = tmp_path / "go"
    subprocess.run(["gcc", tmp_path / "go.c", "-o", program], check=True)
    with pytest.raises(ProbeError, match="Go program"):
        function_offset(str(program), "main", None, nothrow=True)


@pytest.mark.parametrize(
    ("symbol", "expected"),
    [("_start", "does not return"), ("vfork", "does not return"), ("handle_nothing", "has no function handle_nothing")],
)
def test_what_does_not_return_as_functions_do_is_refused(timed: Path, symbol: str, expected: str) -> None:
    with pytest.raises(ProbeError, match=expected):
        function_offset(str(timed), symbol, None, nothrow=False)


def test_an_offset_in_the_middle_of_a_function_is_refused(timed: Path) -> None:
    begins = function_offset(str(timed), REQUEST, None, nothrow=False)
    for stripped in (False, True):
        if stripped:
            subprocess.run(["strip", "--strip-all", "-o", f"{timed}.stripped", timed], check=True)
        path = f"{timed}.stripped" if stripped else str(timed)
        assert function_offset(path, None, begins, nothrow=False) == begins
        for offset in (begins + 1, begins + 4, 16, 1 << 30):
            with pytest.raises(ProbeError, match=r"check slo\.offset"):
                function_offset(path, None, offset, nothrow=False)


@pytest.mark.parametrize(("name", "mirror"), [("watched", Watched), ("latency", abi.Latency)])
def test_every_struct_has_the_objects_layout(name: str, mirror: type[c.Structure]) -> None:
    with BpfObject(OBJECT) as bpf:
        ours = {field[0]: getattr(mirror, field[0]).offset for field in mirror._fields_}
        assert abi._fields_in_btf(bpf, name) == (c.sizeof(mirror), ours)
        assert bpf.lib.bpf_map__max_entries(bpf._map("tallies")) == len(TALLIES)
