# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Members: their containers' names arrive later, and some are gone before they can be read."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from agent.containers import ContainerIndex, gpu_processes
from agent.containers.gpu_processes import GpuProcess, GpuProcessRegistry, ProcessEvent
from agent.core.errors import SetupError
from agent.core.model import HOST, Container, Device, DeviceUuid, ProcessId, Snapshot
from agent.node.procfs import Procfs
from enforce.policy.load import load
from enforce.workloads import workloads_of

A = "3f29c1a7" * 8
DEVICES = [
    Device(index, DeviceUuid(f"GPU-{index}"), "simulated", f"0000:0{index}:00.0", 1, 1, minor=index)
    for index in range(2)
]
NAMED = {"name": "server", "pod": "chat-0", "namespace": "serving", "image": "vllm:1", "labels": {"app": "chat"}}


class Runtime:
    """A runtime that names its containers from a moment on."""

    def __init__(self) -> None:
        self.names: dict[str, Container] = {}
        self.asked = 0

    def named(self, container: Container) -> Container:
        self.asked += 1
        return self.names.get(container.key, container)


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def members(proc: Path, runtime: Runtime) -> GpuProcessRegistry:
    procfs = Procfs(str(proc))
    return GpuProcessRegistry(ContainerIndex(procfs), lambda: DEVICES, procfs, runtime.named)


def runs(proc: Path, tgid: int, cgroup: str) -> ProcessId:
    """A process of that cgroup, in a tree of fixtures."""
    folder = proc / str(tgid)
    folder.mkdir()
    numbers = " ".join(["0"] * 13 + ["1", "0", str(tgid * 100)])
    (folder / "stat").write_text(f"{tgid} (python3) S 1 {numbers} 0 0\n")
    (folder / "cgroup").write_text(f"0::{cgroup}\n")
    (folder / "cmdline").write_bytes(b"python3\0train.py\0")
    (folder / "status").write_text("Name:\tpython3\nUid:\t0\t0\t0\t0\n")
    (folder / "environ").write_bytes(b"CUDA_VISIBLE_DEVICES=1\0")
    return Procfs(str(proc)).process_id(tgid)


def test_a_name_that_arrives_is_taken_up_by_the_next_refresh(
    proc: Path, members: GpuProcessRegistry, runtime: Runtime
) -> None:
    first, second = runs(proc, 10, f"/docker/{A}"), runs(proc, 11, f"/docker/{A}")
    before = members.see(first)
    assert before
    runtime.names[before.container.key] = dataclasses.replace(before.container, name="web")
    members.refresh()
    members.see(second)
    assert [member.container.name for member in members.all()] == ["web", "web"]
    known = members.get(first)
    assert known
    assert known.container is members.all()[0].container is members.all()[1].container
    assert known.container.key == before.container.key
    assert known.process == before.process


def test_a_refresh_without_news_changes_nothing(proc: Path, members: GpuProcessRegistry, runtime: Runtime) -> None:
    members.see(runs(proc, 10, f"/docker/{A}"))
    picture = members.all()
    members.refresh()
    assert members.all() is picture
    assert runtime.asked == 2


@pytest.mark.parametrize(
    "match", ["namespace: serving", 'pod: "chat-*"', 'image: "vllm:*"', "labels: {app: chat}", "container: server"]
)
def test_a_rule_about_names_matches_from_when_they_are_known(
    tmp_path: Path, proc: Path, members: GpuProcessRegistry, runtime: Runtime, match: str
) -> None:
    (tmp_path / "policy.yaml").write_text(
        f"version: 1\noffline:\n  - {{name: training, match: {{{match}}}, law: headroom}}\n"
    )
    policy = load(tmp_path / "policy.yaml")
    snapshot = Snapshot(0, 0, 1)
    member = members.see(runs(proc, 10, f"/kubepods/burstable/pod8dbc5577-d0e2-4706-8787-57d52c03ddf2/{A}"))
    assert member
    key = member.container.key
    assert workloads_of(policy, members.all(), snapshot)[key].classification.rule is None
    runtime.names[key] = dataclasses.replace(member.container, **NAMED)  # type: ignore[arg-type]
    assert workloads_of(policy, members.all(), snapshot)[key].classification.rule is None
    members.refresh()
    seat = workloads_of(policy, members.all(), snapshot)[key]
    assert seat.classification.rule is not None
    assert seat.container.pod == "chat-0"


GONE = ProcessId(77, 7700)


def event(*paths: str) -> ProcessEvent:
    return ProcessEvent(GONE, "train\x1b[2J", 0, paths)


def test_a_process_that_is_gone_is_believed_to_have_been_what_the_kernel_saw(members: GpuProcessRegistry) -> None:
    assert members.see(GONE) is None
    member = members.see(GONE, event("/", f"/docker/{A}"))
    assert member
    assert (member.container.runtime, member.container.id) == ("docker", A)
    assert (member.process.command, member.process.user) == ("[train\\x1b[2J]", "root")
    assert member.visible == ()  # its environment went with it
    assert members.get(GONE) is members.see(GONE) is member


def test_one_that_is_gone_has_the_devices_of_the_environment_that_the_kernel_read(members: GpuProcessRegistry) -> None:
    member = members.see(GONE, ProcessEvent(GONE, "train", 0, ("/",), {"CUDA_VISIBLE_DEVICES": "1"}))
    assert member
    assert (member.container.key, member.visible) == (HOST, ("GPU-1",))


def test_one_that_set_nothing_sees_all_of_the_devices(members: GpuProcessRegistry) -> None:
    member = members.see(GONE, ProcessEvent(GONE, "train", 0, ("/",), {}))
    assert member
    assert member.visible == ("GPU-0", "GPU-1")


def test_one_of_a_container_counts_them_as_its_container_sees_them(
    proc: Path, members: GpuProcessRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Procfs, "gpu_minors", lambda *_: frozenset({1}))
    members.see(runs(proc, 10, f"/docker/{A}"))
    member = members.see(GONE, ProcessEvent(GONE, "train", 0, ("/", f"/docker/{A}"), {}))
    assert member
    assert member.visible == ("GPU-1",)


def test_without_another_process_of_its_container_nothing_is_known_of_them(members: GpuProcessRegistry) -> None:
    member = members.see(GONE, ProcessEvent(GONE, "train", 0, ("/", f"/docker/{A}"), {}))
    assert member
    assert member.visible == ()


def test_what_proc_shows_goes_before_what_the_kernel_reported(proc: Path, members: GpuProcessRegistry) -> None:
    process = runs(proc, 10, f"/docker/{A}")
    member = members.see(process, ProcessEvent(process, "other", 1, ("/system.slice/ssh.service",)))
    assert member
    assert (member.container.runtime, member.process.command) == ("docker", "python3 train.py")
    assert member.visible == ("GPU-1",)


def test_another_process_under_the_same_pid_lends_it_nothing(proc: Path, members: GpuProcessRegistry) -> None:
    runs(proc, GONE.tgid, f"/docker/{A}")
    later = ProcessId(GONE.tgid, GONE.start_ticks - 1)
    member = members.see(later, ProcessEvent(later, "train", 0, ("/system.slice/ssh.service",)))
    assert member
    assert (member.container.name, member.process.command) == ("ssh.service", "[train]")


def test_a_gone_process_of_no_cgroup_is_the_hosts(members: GpuProcessRegistry) -> None:
    member = members.see(GONE, event())
    assert member
    assert member.container.key == HOST


def test_a_process_that_may_not_be_read_is_counted_and_hides_no_other(
    proc: Path, members: GpuProcessRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> dict[str, str]:
        raise SetupError("not allowed to read environ of process 10: run as root")

    process = runs(proc, 10, f"/docker/{A}")
    monkeypatch.setattr(Procfs, "environ", refused)
    assert members.see(process) is None
    assert members.unreadable == 1


def test_whatever_other_containers_took_the_next_one_finds_room(
    members: GpuProcessRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def comes(tgid: int, container: str) -> GpuProcess | None:
        process = ProcessId(tgid, 7)
        return members.see(process, ProcessEvent(process, "train", 0, ("/", f"/docker/{container}")))

    monkeypatch.setattr(gpu_processes, "_MOST", 64)
    monkeypatch.setattr(gpu_processes, "_MOST_OF_ONE_CONTAINER", 32)
    for crowd in range(5):
        for number in range(64):
            comes(100_000 + 64 * crowd + number, f"{crowd:064x}")
    assert comes(9, A) is not None
    assert members.refused == 0
    assert sorted(members.refused_of.values()) == [32, 48, 56, 60, 62]
