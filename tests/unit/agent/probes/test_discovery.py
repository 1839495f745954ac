# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which mapped files are driver libraries: by their content alone, each read once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.node.proc_parse import parse_maps
from agent.probes import discovery
from agent.probes.discovery import Contents
from tools.harness.node import BUILD

LIBCUDA = BUILD / "lib" / "libcuda.so.1"
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1)


def is_driver(contents: Contents, path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return contents.is_driver(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("name", ["libfont.so", "a b\nc", "data.bin"])
def test_a_driver_library_is_known_by_its_content_whatever_its_name(tmp_path: Path, name: str) -> None:
    assert is_driver(Contents(), Path(shutil.copy(LIBCUDA, tmp_path / name)))


def test_other_files_are_none_and_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    contents, text = Contents(), tmp_path / "libcuda.so.1"
    text.write_text("no library")
    assert not is_driver(contents, Path(sys.executable).resolve())
    assert contents.unreadable == 0
    assert not is_driver(contents, text)
    assert contents.unreadable == 1


def test_each_content_is_read_once_and_a_changed_file_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = list[int]()

    def read(descriptor: int, _: str) -> dict[str, int]:
        reads.append(descriptor)
        return {}

    monkeypatch.setattr(discovery, "exported_functions", read)
    contents, path = Contents(), tmp_path / "x"
    path.write_bytes(b"1")
    assert not any(is_driver(contents, path) for _ in range(3))
    assert len(reads) == 1
    path.write_bytes(b"22")
    assert not is_driver(contents, path)
    assert len(reads) == 2


@given(NAMES)
def test_code_is_found_below_any_name_and_data_is_left_out(name: str) -> None:
    path = "/opt/" + name.replace("\n", "\\012")
    lines = [
        f"7f0000000000-7f0000001000 r--p 00000000 fd:00 12 {path}",
        f"7f0000001000-7f0000002000 r-xp 00001000 fd:00 12 {path}",
        "7f0000003000-7f0000004000 r-xp 00000000 00:01 77 /memfd:x (deleted)",
        "7f0000005000-7f0000006000 r-xp 00000000 00:00 0 [vdso]",
        "7f0000006000-7f0000007000 rwxp 00000000 00:00 0",
    ]
    found = list(parse_maps("\n".join(lines), lambda _: True, code=True))
    assert [(file.inode, file.span) for file in found] == [
        (12, "7f0000001000-7f0000002000"),
        (77, "7f0000003000-7f0000004000"),
    ]
