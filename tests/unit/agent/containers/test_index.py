# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A container's processes are those of its cgroup, in the first hierarchy that knows any."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.containers.identity import identify, parse_cgroup
from agent.containers.index import Residents
from agent.core.model import Container
from agent.node.procfs import Procfs

OURS, INNER = "a" * 64, "b" * 64
PATH = f"/docker/{OURS}"


def machine(root: Path, processes: dict[int, str]) -> Residents:
    """A /proc of these processes, and the cgroups that they are in; v1 above all, v2 with nothing in it."""
    legacy, unified = root / "memory", root / "unified"
    unified.mkdir(parents=True)
    (root / str(os.getpid())).mkdir()
    (root / str(os.getpid()) / "mountinfo").write_text(
        f"30 20 0:26 / {legacy} rw - cgroup cgroup rw,memory\n31 20 0:27 / {unified} rw - cgroup2 cgroup2 rw\n"
    )
    for tgid, path in processes.items():
        (legacy / path[1:]).mkdir(parents=True, exist_ok=True)
        with open(legacy / path[1:] / "cgroup.procs", "a") as members:
            members.write(f"{tgid}\n")
        (root / str(tgid)).mkdir()
        (root / str(tgid) / "cgroup").write_text(f"4:memory:{path}\n0::/\n")
        (root / str(tgid) / "stat").write_text(f"{tgid} (x) S" + " 1" * 49 + "\n")
    return Residents(Procfs(str(root)))


def container(path: str) -> Container:
    return identify(parse_cgroup(f"4:memory:{path}\n0::/\n"))


def test_those_of_cgroups_below_count_and_those_of_a_container_inside_do_not(tmp_path: Path) -> None:
    residents = machine(
        tmp_path, {11: PATH, 12: PATH, 13: f"{PATH}/worker", 14: f"{PATH}/docker/{INNER}", 15: f"/docker/{INNER}"}
    )
    assert residents.of(container(PATH)) == {11, 12, 13}


def test_a_process_that_left_counts_no_more(tmp_path: Path) -> None:
    residents = machine(tmp_path, {11: PATH, 12: PATH})
    assert residents.of(container(PATH)) == {11, 12}
    (tmp_path / "memory" / PATH[1:] / "cgroup.procs").write_text("12\n")
    assert residents.of(container(PATH)) == {12}


def test_a_container_that_is_gone_has_none(tmp_path: Path) -> None:
    assert machine(tmp_path, {11: PATH}).of(container("/docker/" + "c" * 64)) == set()


def test_of_any_number_of_cgroups_no_more_are_listed_than_are_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Side by side, which a listing by whole directories would all hold."""
    monkeypatch.setattr("agent.containers.index._MOST_FOLDERS", 20)
    residents = machine(tmp_path, {tgid: f"{PATH}/worker{tgid}" for tgid in range(100, 400)} | {11: PATH})
    listed, scandir = 0, os.scandir

    @contextmanager
    def counted(path: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        def entries() -> Iterator[os.DirEntry[str]]:
            nonlocal listed
            for entry in found:
                listed += 1
                yield entry

        with scandir(path) as found:
            yield entries()

    monkeypatch.setattr(os, "scandir", counted)
    found = residents.of(container(PATH))
    assert 11 in found
    assert len(found) == 20
    assert listed <= 21  # the directories, and cgroup.procs beside them
