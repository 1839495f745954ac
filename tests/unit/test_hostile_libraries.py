# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A file that calls itself libcuda may be anybody's: it costs little and hides no other."""

from __future__ import annotations

import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.discovery import Discovery
from agent.elf import exported_functions
from agent.errors import ProbeError
from agent.model import ProcessId
from agent.procfs import Procfs

_SECTION = struct.Struct("<IIQQQQIIQQ")
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")


def _library(path: Path, symbols: int, names: bytes) -> Path:
    """One of that many dynamic symbols, all with the same name."""
    sections = 64 + 3 * _SECTION.size
    table = b"\0.dynsym\0.dynstr\0"
    at_symbols, at_names = sections + len(table), sections + len(table) + 24 * symbols
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head = _HEADER.pack(ident, 3, 62, 1, 0, 0, 64, 0, 64, 56, 0, 64, 3, 2)
    first = _SECTION.pack(1, 11, 2, 0, at_symbols, 24 * symbols, 1, 0, 8, 24)
    second = _SECTION.pack(9, 3, 2, 0, at_names, len(names), 0, 0, 1, 0)
    third = _SECTION.pack(0, 3, 0, 0, sections, len(table), 0, 0, 1, 0)
    symbol = struct.pack("<IBBHQQ", 0, 18, 0, 1, 4096, 16)
    path.write_bytes(head + first + second + third + table + symbol * symbols + names)
    return path


def test_a_library_is_read(tmp_path: Path) -> None:
    assert exported_functions(str(_library(tmp_path / "libcuda.so.1", 3, b"cuInit\0")), "cu") == {}  # in no segment


@pytest.mark.parametrize(("symbols", "names"), [(400_000, b"cuInit\0"), (200, b"c" * (1 << 20))])
def test_a_library_with_more_to_read_than_any_libcuda_is_refused(tmp_path: Path, symbols: int, names: bytes) -> None:
    with pytest.raises(ProbeError, match="more to read than any libcuda"):
        exported_functions(str(_library(tmp_path / "libcuda.so.1", symbols, names)), "cu")


@given(st.binary(max_size=200))
def test_whatever_is_in_a_file_it_is_a_library_or_a_probe_error(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    path = tmp_path_factory.mktemp("hostile") / "libcuda.so.1"
    path.write_bytes(b"\x7fELF\x02\x01\x01" + tail)
    with suppress(ProbeError):
        assert isinstance(exported_functions(str(path), "cu"), dict)


class Attaching:
    """Refuses one process's library, in a way that nobody thought of."""

    def __init__(self) -> None:
        self.seen: list[int | None] = []
        self.dropped = 0

    def ensure(self, path: str, tgid: int | None = None) -> Any:
        self.seen.append(tgid)
        if tgid == 10:
            raise OSError(5, "Input/output error")

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
    monkeypatch.setattr("agent.discovery.host_libraries", lambda extra: [])
    attaching = Attaching()
    _runs(tmp_path, 10)
    _runs(tmp_path, 11)
    Discovery(attaching, Procfs(str(tmp_path))).look()  # type: ignore[arg-type]
    assert set(attaching.seen) == {10, 11}


def test_one_process_cannot_have_any_number_of_libraries_attached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent.discovery.host_libraries", lambda extra: [])
    attaching = Attaching()
    _runs(tmp_path, 11, libraries=1000)
    Discovery(attaching, Procfs(str(tmp_path))).look()  # type: ignore[arg-type]
    assert len(attaching.seen) == 8
