# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where an MPS control daemon that names no directory has its sockets, when an ended one has left others."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agent.node.procfs import Procfs
from enforce.actuators.mps import daemons

HEADER = "Num       RefCount Protocol Flags    Type St Inode Path\n"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Procfs:
    """A /proc with one daemon, and two usual directories in which there are sockets."""
    usual = (tmp_path / "run", tmp_path / "tmp")
    for folder in usual:
        folder.mkdir()
        (folder / "control").touch()
    monkeypatch.setattr(daemons, "_USUAL_DIRECTORIES", tuple(map(str, usual)))
    process = tmp_path / "proc" / "7"
    (process / "net").mkdir(parents=True)
    (process / "ns").mkdir()
    for name in ("cmdline", "environ", "stat", "status"):
        shutil.copy(f"/proc/self/{name}", process / name)
    (process / "cmdline").write_bytes(b"nvidia-cuda-mps-control\0-d\0")
    (process / "environ").write_bytes(b"HOME=/root\0")
    (process / "exe").symlink_to("/bin/sh")
    (tmp_path / "proc" / "self").symlink_to(process)
    (process / "root").symlink_to("/")
    (process / "ns" / "mnt").symlink_to(os.readlink("/proc/self/ns/mnt"))
    return Procfs(str(tmp_path / "proc"))


@pytest.mark.parametrize(
    ("listening", "used"), [(("run",), "run"), (("tmp",), "tmp"), (("run", "tmp"), "run"), ((), "run")]
)
def test_it_is_where_something_listens(proc: Procfs, tmp_path: Path, listening: tuple[str, ...], used: str) -> None:
    lines = [f"0000: 00000002 00000000 00010000 0001 01 7 {tmp_path}/{name}/control\n" for name in listening]
    (tmp_path / "proc" / "7" / "net" / "unix").write_text(HEADER + "".join(lines))
    (found,) = daemons.daemons(proc)
    assert found.pipe_directory == str(tmp_path / used)
