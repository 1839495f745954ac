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
from agent.containers.index import ContainerIndex, Residents
from agent.core.model import Container, ContainerKey, ProcessId
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


def test_those_of_cgroups_below_count_and_of_containers_that_it_runs_itself(tmp_path: Path) -> None:
    residents = machine(
        tmp_path, {11: PATH, 12: PATH, 13: f"{PATH}/worker", 14: f"{PATH}/docker/{INNER}", 15: f"/docker/{INNER}"}
    )
    assert residents.of(container(PATH)) == {11, 12, 13, 14}


def test_a_process_that_left_counts_no_more(tmp_path: Path) -> None:
    residents = machine(tmp_path, {11: PATH, 12: PATH})
    assert residents.of(container(PATH)) == {11, 12}
    (tmp_path / "memory" / PATH[1:] / "cgroup.procs").write_text("12\n")
    assert residents.of(container(PATH)) == {12}


def test_who_asks_once_leaves_nothing_behind_that_a_later_process_could_be_taken_for(tmp_path: Path) -> None:
    residents = machine(tmp_path, {11: PATH, 12: PATH})
    assert residents.once(container(PATH)) == {11, 12}
    (tmp_path / "11" / "stat").write_text("11 (x) S" + " 2" * 49 + "\n")  # another one, which another container has
    (tmp_path / "11" / "cgroup").write_text(f"4:memory:/docker/{INNER}\n0::/\n")
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


def test_of_two_cgroups_that_claim_one_id_the_first_has_it_while_it_exists(tmp_path: Path) -> None:
    second = f"/other/docker-{OURS}.scope"
    machine(tmp_path, {11: PATH, 12: second, 13: second})
    index = ContainerIndex(Procfs(str(tmp_path)))
    first = index.container_of(ProcessId(11, 1))
    assert (first.id, first.cgroup) == (OURS, PATH)
    impostor = index.container_of(ProcessId(12, 1))
    assert (impostor.key, impostor.id, impostor.cgroup) == (f"refused:{second}", "", second)
    assert index.refused == 1
    (tmp_path / "memory" / PATH[1:] / "cgroup.procs").unlink()
    (tmp_path / "memory" / PATH[1:]).rmdir()
    assert index.container_of(ProcessId(13, 1)).key == first.key


def test_an_id_belongs_to_the_cgroup_that_its_runtime_reported(tmp_path: Path) -> None:
    claimed = f"/other/docker-{OURS}.scope"
    machine(tmp_path, {11: claimed, 12: PATH})
    reported: dict[ContainerKey, str] = {}
    index = ContainerIndex(Procfs(str(tmp_path)), placed=lambda: reported)
    key = index.container_of(ProcessId(11, 1)).key
    assert index.container_of(ProcessId(12, 1)).key != key
    assert not index.correct()
    reported[key] = PATH
    assert index.correct()
    assert index.container_of(ProcessId(12, 1)).key == key
    assert index.container_of(ProcessId(11, 1)).key != key
    assert not index.correct()


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a directory to another user needs root")
def test_a_container_below_a_users_directory_is_that_users(tmp_path: Path) -> None:
    path = f"/ours/docker-{OURS}.scope"
    machine(tmp_path, {11: path})
    os.chown(tmp_path / "memory" / "ours", 1000, -1)
    it = ContainerIndex(Procfs(str(tmp_path))).container_of(ProcessId(11, 1))
    assert (it.uid, it.key) == (1000, f"docker:1000/{OURS}")
