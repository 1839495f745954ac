# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A file that calls itself libcuda may be any user's: it costs little and hides no other."""

from __future__ import annotations

import io
import os
import struct
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agent.core.errors import ProbeError, SetupError
from agent.core.model import ProcessId
from agent.node.elf import Bounded, exported_functions
from agent.node.elf_functions import function_offset
from agent.node.instructions import returns
from agent.node.procfs import Procfs
from agent.probes.discovery import Discovery
from agent.probes.symbols import unknown_versions

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")  # as in <elf.h>: Elf64_Ehdr, Elf64_Shdr, Elf64_Phdr
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SEGMENT = struct.Struct("<IIQQQQQQ")
_STRINGS, _DYNSYM = 3, 11
_LOAD, _EXECUTABLE = 1, 1
_MOST_SECONDS = 5.0  # of CPU time; what is refused takes milliseconds
_CTYPES = find_spec("_ctypes")
assert _CTYPES
assert _CTYPES.origin
_MODULES = Path(_CTYPES.origin).parent.glob("*.so")
REAL = min(_MODULES, key=lambda path: path.stat().st_size)  # a small library that is there wherever Python is
ITS_OWN = f"PyInit_{REAL.name.partition('.')[0]}"


@dataclass(frozen=True)
class Made:
    """An ELF library to the letter, but for what a test asks for."""

    symbols: int = 3
    names: bytes = b"\0cuInit\0"
    name_at: int = 1
    value: int = 0x1000
    dynsym: tuple[int, ...] = ()  # in place of its section header: offset, size, link, entry size
    header: Mapping[str, int] = field(default_factory=dict)
    segments: tuple[tuple[int, int, int], ...] = ((0, 0x1000, 0x1000),)  # offset, address, size in the file
    tail: bytes = bytes(64)

    def write(self, path: Path) -> Path:
        table = b"\0.dynsym\0.dynstr\0"
        sections = 64 + len(self.segments) * _SEGMENT.size
        at_table = sections + 3 * _SECTION.size
        at_symbols = at_table + len(table)
        at_names = at_symbols + 24 * self.symbols
        it = {"phoff": 64, "shoff": sections, "phnum": len(self.segments), "shnum": 3, "shstrndx": 0, **self.header}
        ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        counts = (64, 56, it["phnum"], 64, it["shnum"], it["shstrndx"])
        symbol = struct.pack("<IBBHQQ", self.name_at, 18, 0, 1, self.value, 16)
        parts = [_HEADER.pack(ident, 3, 62, 1, 0, it["phoff"], it["shoff"], 0, *counts)]
        parts += [_SEGMENT.pack(_LOAD, _EXECUTABLE | 4, at, to, to, size, size, 1) for at, to, size in self.segments]
        first = (it.get("size", len(table)), it.get("link", 0), it.get("info", 0))
        offset, size, link, entry = self.dynsym or (at_symbols, 24 * self.symbols, 2, 24)
        parts.append(_SECTION.pack(0, _STRINGS, 0, 0, at_table, *first, 1, 0))
        parts.append(_SECTION.pack(1, _DYNSYM, 2, 0, offset, size, link, 0, 8, entry))
        parts.append(_SECTION.pack(9, _STRINGS, 2, 0, at_names, len(self.names), 0, 0, 1, 0))
        path.write_bytes(b"".join([*parts, table, symbol * self.symbols, self.names, self.tail]))
        return path


@pytest.fixture
def quick() -> Iterator[None]:
    """Whatever it is, it costs little."""
    began = time.process_time()
    yield
    assert time.process_time() - began < _MOST_SECONDS


def looked_at(path: Path) -> dict[str, int]:
    """Everything that the agent does with such a file. ProbeError, and nothing else, is an answer too."""
    offsets: dict[str, int] = {}
    with suppress(ProbeError):
        offsets = exported_functions(str(path), "")
    for name in ("cuInit", ITS_OWN):
        with suppress(ProbeError):
            assert 0 <= function_offset(str(path), name, None, nothrow=True) < path.stat().st_size
    with suppress(ProbeError):
        function_offset(str(path), None, 0x40, nothrow=False)
    with suppress(ProbeError):
        returns(str(path), list(offsets.values())[:32], list(offsets.values()), "x86_64")
    assert all(0 <= offset < path.stat().st_size for offset in offsets.values())
    return offsets


def test_a_library_is_read(tmp_path: Path) -> None:
    assert looked_at(Made(value=0x1010).write(tmp_path / "libcuda.so.1")) == {"cuInit": 0x10}
    assert exported_functions(str(Made(value=0x9000).write(tmp_path / "other.so")), "cu") == {}  # in no segment


def test_a_real_library_is_read() -> None:
    assert ITS_OWN in looked_at(REAL)


def test_a_descriptor_serves_as_well_as_a_path_and_stays_open(tmp_path: Path) -> None:
    with open(Made(value=0x1010).write(tmp_path / "libcuda.so.1"), "rb") as file:
        for _ in range(2):
            assert exported_functions(file.fileno(), "cu") == {"cuInit": 0x10}


HUGE = (1 << 64) - 1
CRAFTED: dict[str, Made] = {
    "400,000 symbols": Made(symbols=400_000),
    "a name without an end": Made(names=b"\0" + b"c" * (1 << 20), tail=b""),
    "a name beyond the names": Made(name_at=1 << 31),
    "its symbols are its names' names": Made(dynsym=(0, 240, 1, 24)),
    "its symbols' names are its symbols, and the other way round": Made(dynsym=(0, 240, 1, 24), header={"link": 1}),
    "its names are those of no section": Made(dynsym=(0, 240, 4_000_000_000, 24)),
    "symbols of no size": Made(dynsym=(0, 240, 2, 0)),
    "symbols without an end": Made(dynsym=(0, HUGE, 2, 24)),
    "symbols beyond the end": Made(dynsym=(HUGE, 240, 2, 24)),
    "65,535 sections": Made(header={"shnum": 65_535}),
    "a million sections": Made(header={"shnum": 0, "size": 1_000_000}),
    "sections beyond the end": Made(header={"shoff": HUGE}),
    "sections on top of the header": Made(header={"shoff": 0}),
    "its section names are in no section": Made(header={"shstrndx": 65_000}),
    "its section names are its symbols": Made(header={"shstrndx": 1}),
    "65,534 segments": Made(header={"phnum": 65_534}),
    "as many segments as the first section states": Made(header={"phnum": 0xFFFF, "info": 1 << 31}),
    "segments beyond the end": Made(header={"phoff": HUGE}),
    "segments one upon the other": Made(segments=((0, 0x1000, 0x1000), (0x40, 0x1000, 0x1000), (0, 0x0800, 0x1000))),
    "a segment larger than the file": Made(value=0x1000 + (1 << 40), segments=((0, 0x1000, HUGE - 0x1000),)),
    "a segment beyond the file": Made(segments=((1 << 62, 0x1000, 0x1000),)),
    "a segment at the end of all addresses": Made(value=HUGE, segments=((HUGE, HUGE - 1, HUGE),)),
}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("made", CRAFTED.values(), ids=CRAFTED)
def test_a_library_made_to_keep_us_busy_or_lead_us_astray_does_neither(tmp_path: Path, made: Made) -> None:
    looked_at(made.write(tmp_path / "libcuda.so.1"))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "made",
    [
        Made(symbols=400_000),
        Made(header={"shnum": 65_535}),
        Made(header={"phnum": 65_534}),
        Made(symbols=10_001),
    ],
)
def test_a_library_with_more_to_read_than_any_libcuda_is_refused(tmp_path: Path, made: Made) -> None:
    with pytest.raises(ProbeError, match="more to read than any libcuda"):
        exported_functions(str(made.write(tmp_path / "libcuda.so.1")), "cu")


@pytest.mark.parametrize(
    "name", [b"cu" + b"c" * (1 << 20), b"cu" + b"c" * 127, b"cu\xff", b"cu\xc3\xa9"], ids=["no end", "long", "1", "2"]
)
def test_a_name_that_none_of_ours_can_have_is_left_out(tmp_path: Path, name: bytes) -> None:
    end = b"" if len(name) > 1000 else b"\0"
    path = Made(value=0x1010, names=b"\0" + name + end, tail=b"").write(tmp_path / "libcuda.so.1")
    assert exported_functions(str(path), "cu") == {}
    longest = Made(value=0x1010, names=b"\0" + b"cu" + b"c" * 126 + b"\0").write(tmp_path / "libcuda.so.1")
    assert exported_functions(str(longest), "cu") == {"cu" + "c" * 126: 0x10}


def test_names_one_upon_the_other_cost_no_more_than_others(tmp_path: Path) -> None:
    """Of 100,000 symbols, each of which has a name of its own, a kilobyte long, that cannot be decoded as it is."""
    path = overlapping(tmp_path / "libcuda.so.1")
    tracemalloc.start()
    began_ns = time.thread_time_ns()
    try:
        with suppress(ProbeError):
            assert exported_functions(str(path), "") == {}
        took_ns, (_, most_bytes) = time.thread_time_ns() - began_ns, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most_bytes < 32 << 20
    assert took_ns < 2_000_000_000  # what it took was 18 s


def overlapping(path: Path, symbols: int = 100_000, letter: bytes = b"\xff") -> Path:
    names = (letter * 1022 + b"\0") * (symbols // 1022 + 1)
    made = Made(symbols=symbols, names=names).write(path)
    whole = bytearray(made.read_bytes())
    start = whole.index(b"\0.dynsym\0.dynstr\0") + 17
    for number in range(symbols):
        struct.pack_into("<I", whole, start + 24 * number, number)
    path.write_bytes(whole)
    return path


def test_a_library_that_takes_long_to_read_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Made(value=0x1010).write(tmp_path / "libcuda.so.1")
    clock = count(step=170_000_000)
    monkeypatch.setattr("agent.node.elf.time.thread_time_ns", lambda: next(clock))
    with pytest.raises(ProbeError, match="500 ms were not enough"):
        exported_functions(str(path), "cu")
    assert next(clock) == 4 * 170_000_000  # asked as often as it reads


@pytest.mark.parametrize("ident", [b"\x7fELF\x01\x01\x01", b"\x7fELF\x02\x02\x01", b"MZ", b""])
def test_a_program_of_another_machine_or_none_is_refused(tmp_path: Path, ident: bytes) -> None:
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(ident + REAL.read_bytes()[len(ident) :] if ident else b"")
    with pytest.raises(ProbeError):
        exported_functions(str(path), "cu")


@pytest.mark.usefixtures("quick")
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.binary(min_size=1, max_size=16)), max_size=24), st.integers(0, 4))
def test_whatever_bytes_of_a_real_library_are_changed_it_is_read_or_refused(
    tmp_path: Path, edits: list[tuple[int, bytes]], cut: int
) -> None:
    whole = bytearray(REAL.read_bytes())
    parts = _telling(whole)
    for at, new in edits:
        start, size = parts[at % len(parts)]
        place = start + at // len(parts) % size
        whole[place : place + len(new)] = new
    path = tmp_path / "libcuda.so.1"
    path.write_bytes(whole[: len(whole) >> cut])
    looked_at(path)


def _telling(whole: bytearray) -> list[tuple[int, int]]:
    """Where headers, sections, symbols and their names are: what is changed elsewhere is never read."""
    elf = ELFFile(io.BytesIO(whole))
    wanted = (elf.get_section_by_name(name) for name in (".dynsym", ".dynstr", ".eh_frame_hdr"))
    inside = [(section["sh_offset"], section["sh_size"]) for section in wanted if section is not None]
    segments, sections = elf["e_phnum"] * elf["e_phentsize"], elf["e_shnum"] * elf["e_shentsize"]
    return [(0, 64), (elf["e_phoff"], segments), (elf["e_shoff"], sections), *inside]


@given(st.binary(max_size=200))
def test_whatever_is_in_a_file_it_is_a_library_or_a_probe_error(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("hostile") / "libcuda.so.1"
    path.write_bytes(b"\x7fELF\x02\x01\x01" + tail)
    looked_at(path)


def test_a_library_that_is_cut_while_it_is_read_is_an_error_and_no_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = Made(value=0x1010).write(tmp_path / "libcuda.so.1"), Bounded.at

    def cut(stream: Bounded, offset: int, size: int) -> bytes:
        os.truncate(path, offset + size // 2)
        return read(stream, offset, size)

    monkeypatch.setattr(Bounded, "at", cut)
    with suppress(ProbeError):
        assert exported_functions(str(path), "cu") == {}


def test_names_that_look_like_newer_calls_are_reported_up_to_a_bound() -> None:
    assert len(unknown_versions([f"cuMemAlloc_v{number}" for number in range(100, 100_000)])) == 64


class Attaching:
    """Refuses one process's library, in an unforeseen way."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.dropped = 0
        self.refusal: Exception = OSError(5, "Input/output error")

    def ensure(self, path: str, process: ProcessId) -> Any:
        self.seen.append(process.tgid)
        if process.tgid == 10:
            raise self.refusal

    def libraries(self) -> tuple[()]:
        return ()


def _runs(proc: Path, tgid: int, libraries: int = 1) -> ProcessId:
    folder = proc / str(tgid)
    folder.mkdir()
    (folder / "stat").write_text(f"{tgid} (python3) S 1 {' '.join(['0'] * 13)} 1 0 {tgid} 0 0\n")
    lines = (f"7f00-7f01 r-xp 00000000 08:01 {one} /opt/{one}/libcuda.so.1\n" for one in range(1, libraries + 1))
    (folder / "maps").write_text("".join(lines))
    return ProcessId(tgid, tgid)


def test_a_library_that_cannot_be_attached_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.probes.discovery.host_libraries", lambda extra: [])
    attaching = Attaching()
    _runs(tmp_path, 10)
    _runs(tmp_path, 11)
    Discovery(attaching, Procfs(str(tmp_path))).look()  # type: ignore[arg-type]
    assert set(attaching.seen) == {10, 11}


def test_one_process_cannot_have_any_number_of_libraries_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.probes.discovery.host_libraries", lambda extra: [])
    attaching = Attaching()
    _runs(tmp_path, 11, libraries=1000)
    Discovery(attaching, Procfs(str(tmp_path))).look()  # type: ignore[arg-type]
    assert len(attaching.seen) == 8


def test_files_that_this_agent_may_not_open_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent.probes.discovery.host_libraries", lambda extra: [])
    attaching = Attaching()
    attaching.refusal = SetupError("openat2 is refused here")
    _runs(tmp_path, 10)
    _runs(tmp_path, 11)
    discovery = Discovery(attaching, Procfs(str(tmp_path)))  # type: ignore[arg-type]
    discovery.look()
    assert (discovery.refused, set(attaching.seen)) == (1, {10, 11})
    discovery.look()
    assert discovery.refused == 1, "a process counts once, however often it is looked at"


class Slow(Attaching):
    """Each file takes a quarter of a second of a clock that only this moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.files: list[tuple[int, str]] = []
        self.now_ns = 0
        monkeypatch.setattr("agent.probes.discovery.host_libraries", lambda extra: [])
        monkeypatch.setattr("agent.probes.discovery.monotonic_ns", lambda: self.now_ns)

    def ensure(self, path: str, process: ProcessId) -> Any:
        self.files.append((process.tgid, path))
        self.now_ns += 250_000_000


@pytest.mark.parametrize("of_nvml", [True, False], ids=["listed by NVML", "any"])
def test_a_round_ends_in_time_within_a_process_too_and_the_next_ones_look_at_the_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_nvml: bool
) -> None:
    slow = Slow(monkeypatch)
    processes = [_runs(tmp_path, tgid, libraries=8) for tgid in range(20, 30)]
    discovery = Discovery(slow, Procfs(str(tmp_path)))  # type: ignore[arg-type]
    for _ in range(80):
        before, began_ns = len(slow.files), slow.now_ns
        if of_nvml:
            discovery.look_at(processes, began_ns + 500_000_000)
        else:
            discovery.look(began_ns + 500_000_000)
        assert len(slow.files) - before <= 3
    assert len(set(slow.files)) == 10 * 8


def test_new_processes_without_an_end_hold_none_up_that_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    discovery = Discovery(slow, Procfs(str(tmp_path)))  # type: ignore[arg-type]
    _runs(tmp_path, 19, libraries=0)
    discovery.look()
    (tmp_path / "19" / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 9 /opt/late/libcuda.so.1\n")
    for round_ in range(10):
        for number in range(20):
            _runs(tmp_path, 100 + 20 * round_ + number)
        discovery.look()
    assert (19, "/opt/late/libcuda.so.1") in slow.files
    assert {tgid for tgid, _ in slow.files} & set(range(280, 300)), "and new ones are looked at as they come"
