# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The one mechanism that keeps a signal's probes on containers' processes. Kernel, /proc and clock are not there."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from agent.core.errors import GoneError, ProbeError
from agent.core.model import Container, ContainerKey, ProcessId
from agent.core.worker import Worker
from agent.node.procfs import Procfs
from enforce.signals.process_follower import PENDING, FollowerSettings, ProcessFollower

S = 1_000_000_000
CHAT, OTHER = (Container(ContainerKey(f"runc:{name}"), name, "runc", cgroup=f"/{name}") for name in ("chat", "other"))


@dataclass
class Kernel:
    """The kernel side: `refused` tgids cannot be followed."""

    counted: set[int] = field(default_factory=set)  # numbers
    wanted: dict[int, int] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    unused: int = 0
    closed: bool = False
    pointed: list[tuple[int, int]] = field(default_factory=list)

    def begin(self, number: int, source: str) -> None:
        if source == "no room":
            raise OSError("the map is full")
        self.counted.add(number)

    def end(self, number: int) -> None:
        self.counted.remove(number)
        self.wanted = {tgid: found for tgid, found in self.wanted.items() if found != number}

    def buckets(self, number: int) -> bytes | None:
        return b"" if number in self.counted else None

    def point(self, number: int, slots: int) -> None:
        assert number in self.counted
        self.pointed.append((number, slots))

    def followed(self) -> dict[int, int]:
        return dict(self.wanted)

    def follow(self, number: int, source: str, process: ProcessId) -> None:
        assert number in self.counted
        if process.tgid in self.refused:
            raise ProbeError(f"{source}: it is a Go program")
        self.wanted[process.tgid] = number

    def unfollow(self, tgid: int) -> None:
        del self.wanted[tgid]

    def drop_changed(self) -> Collection[int]:
        changed, self.changed = self.changed, set()
        for tgid in changed:
            del self.wanted[tgid]
        return changed

    def drop_unused(self) -> None:
        self.unused += 1

    def changes_fd(self) -> int | None:
        return None

    def details(self, number: int) -> dict[str, int]:
        return {}

    def tallies(self) -> dict[str, int]:
        return {"full": 1}

    def close(self) -> None:
        self.closed = True


class Stage:
    """Containers, their processes, and the time; the test makes the rounds."""

    def __init__(self, settings: FollowerSettings[str]) -> None:
        self.now_ns = 0
        self.members: dict[ContainerKey, set[int]] = {}
        self.kernels: list[Kernel] = []
        self.load_fails = False
        self.identified: list[int] = []
        self.follower = ProcessFollower[str](settings, self.load, self, cast(Procfs, self))

    def load(self) -> Kernel:
        if self.load_fails:
            raise ProbeError("run `make bpf`")
        self.kernels.append(Kernel())
        return self.kernels[-1]

    @property
    def kernel(self) -> Kernel:
        return self.kernels[-1]

    def of(self, container: Container) -> set[int]:
        return self.members.get(container.key, set())

    def forget(self, container: ContainerKey) -> None:
        """Nothing is kept."""

    def process_id(self, tgid: int) -> ProcessId:
        self.identified.append(tgid)
        if tgid < 0:
            raise GoneError("it has ended")
        return ProcessId(tgid, 1)

    def watch(self, container: Container = CHAT, source: str = "f", only: Any = None) -> int | None:
        return self.follower.watch(container, source, self.now_ns, only)

    def begun(self, container: Container = CHAT) -> int:
        """The number of its watch, after a round."""
        self.watch(container)
        self.round()
        number = self.watch(container)
        assert number is not None
        return number

    def round(self, after_ns: int = S) -> Kernel:
        self.now_ns += after_ns
        self.follower.step()
        return self.kernel


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return staged(monkeypatch, FollowerSettings("test"))


def staged(monkeypatch: pytest.MonkeyPatch, settings: FollowerSettings[str]) -> Stage:
    stage = Stage(settings)
    monkeypatch.setattr(Worker, "start", lambda _: None)
    monkeypatch.setattr("enforce.signals.process_follower.monotonic_ns", lambda: stage.now_ns)
    return stage


def test_nothing_is_loaded_before_a_container_is_watched(stage: Stage) -> None:
    stage.follower.step()
    assert not stage.kernels
    assert not stage.follower.started
    assert stage.watch() is None
    assert stage.follower.trouble(CHAT.key) == PENDING
    stage.round()
    assert stage.watch() in stage.kernel.counted


def test_a_thread_that_cannot_be_made_is_tried_again_at_the_next_reading(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Worker) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as exhausted:
        exhausted.setattr(Worker, "start", refuse)
        with pytest.raises(RuntimeError):
            stage.watch()
        assert not stage.follower.started
    stage.watch()
    assert stage.follower.started


def test_exactly_the_processes_that_are_there_are_followed(stage: Stage) -> None:
    stage.members[CHAT.key] = {1, 2, -3}
    number = stage.begun()
    assert stage.kernel.wanted == {1: number, 2: number}
    stage.members[CHAT.key] = {2, 4}
    assert stage.round().wanted == {2: number, 4: number}


def test_a_child_that_the_kernel_added_is_unfollowed_when_it_is_in_no_container(stage: Stage) -> None:
    stage.members[CHAT.key] = {1}
    number = stage.begun()
    stage.kernel.wanted[7] = number
    assert stage.round().wanted == {1: number}


def test_a_process_that_the_kernel_dropped_is_followed_again(stage: Stage) -> None:
    stage.members[CHAT.key] = {1}
    stage.watch()
    stage.round().wanted.clear()
    assert stage.round().wanted.keys() == {1}


def test_a_pid_that_passed_to_another_container_counts_there(stage: Stage) -> None:
    stage.members = {CHAT.key: {1}, OTHER.key: {2}}
    stage.watch(CHAT)
    stage.watch(OTHER)
    stage.round()
    chat, other = stage.watch(CHAT), stage.watch(OTHER)
    stage.members = {CHAT.key: {2}, OTHER.key: {1}}
    assert stage.round().wanted == {1: other, 2: chat}


def test_given_processes_stand_in_for_the_containers_own(stage: Stage) -> None:
    stage.members[CHAT.key] = {1, 2}
    stage.watch(only=[ProcessId(9, 1)])
    assert stage.round().wanted.keys() == {9}


def test_a_process_that_cannot_be_followed_is_counted_logged_once_and_retried(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.members = {CHAT.key: {1}, OTHER.key: {2}}
    stage.watch(CHAT)
    stage.watch(OTHER)
    stage.follower.step()
    stage.kernel.refused, stage.kernel.wanted = {1}, {}
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            assert stage.round().wanted.keys() == {2}
    assert stage.follower.trouble(CHAT.key) == "f: it is a Go program"
    assert stage.follower.trouble(OTHER.key) is None
    assert stage.follower.failures == {("f", "refused"): 3}  # every five seconds
    assert [record.message for record in caplog.records] == ["signal test: f: it is a Go program"]
    stage.kernel.refused = set()
    stage.round(5 * S)
    assert stage.kernel.wanted.keys() == {1, 2}
    assert stage.follower.trouble(CHAT.key) is None


def test_one_process_that_is_followed_is_enough_to_have_no_trouble(stage: Stage) -> None:
    stage.members[CHAT.key] = {1, 2}
    stage.watch()
    stage.follower.step()
    stage.kernel.refused, stage.kernel.wanted = {1}, {}
    stage.round()
    assert stage.follower.failures
    assert stage.follower.trouble(CHAT.key) is None


def test_a_container_without_processes_is_a_trouble(stage: Stage) -> None:
    stage.watch()
    stage.round()
    assert stage.follower.trouble(CHAT.key) == "no process of runc:chat was found"


def test_a_process_whose_program_is_written_over_is_left_alone_for_a_while(stage: Stage) -> None:
    stage.members[CHAT.key] = {1}
    stage.watch()
    stage.round().changed = {1}
    for _ in range(5):
        assert not stage.round().wanted
    assert stage.round().wanted.keys() == {1}


@pytest.mark.parametrize("change", ["source", "cgroup"])
def test_what_is_watched_again_counts_under_another_number(stage: Stage, change: str) -> None:
    stage.members[CHAT.key] = {1}
    before = stage.begun()
    moved = Container(CHAT.key, "chat", "runc", cgroup="/elsewhere")
    assert (stage.watch(CHAT, "g") if change == "source" else stage.watch(moved)) is None
    stage.round()
    after = stage.watch(CHAT, "g") if change == "source" else stage.watch(moved)
    assert before != after
    assert stage.kernel.counted == {after}
    assert stage.kernel.wanted == {1: after}


def test_a_container_that_is_forgotten_has_no_probes_and_the_object_stays(stage: Stage) -> None:
    stage.members[CHAT.key] = {1}
    stage.watch()
    stage.round()
    stage.follower.forget(CHAT.key)
    kernel = stage.round()
    assert (kernel.counted, kernel.wanted, kernel.closed) == (set(), {}, False)


def test_what_was_not_read_for_long_is_watched_no_more_and_the_object_is_unloaded_with_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = staged(monkeypatch, FollowerSettings("test", idle_ns=5 * S))
    stage.watch(CHAT)
    for _ in range(6):
        stage.watch(OTHER)
        stage.round()
    assert stage.watch(OTHER) is not None
    assert len(stage.kernel.counted) == 1
    stage.round(6 * S)
    assert stage.kernel.closed
    assert stage.follower.tallies() == {"full": 1}
    number = stage.begun(OTHER)
    assert len(stage.kernels) == 2
    assert stage.kernel.counted == {number}
    assert stage.follower.tallies() == {"full": 2}


def test_an_object_that_does_not_load_is_a_trouble_logged_once_and_retried(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.load_fails = True
    stage.watch()
    with caplog.at_level(logging.ERROR):
        for _ in range(7):
            stage.now_ns += S
            stage.follower.step()
    assert stage.follower.trouble(CHAT.key) == "run `make bpf`"
    assert stage.follower.failures == {("f", "load"): 2}
    assert len(caplog.records) == 1
    stage.load_fails = False
    stage.round(5 * S)
    assert stage.watch() is not None


def test_a_watch_for_which_there_is_no_room_takes_nothing_from_the_others(stage: Stage) -> None:
    stage.members = {CHAT.key: {1}, OTHER.key: {2}}
    stage.watch(CHAT, "no room")
    stage.watch(OTHER)
    assert stage.round().wanted.keys() == {2}
    assert stage.follower.trouble(CHAT.key) == "the map is full"
    assert stage.follower.failures == {("no room", "failed"): 1}


def test_closing_detaches_everything(stage: Stage) -> None:
    stage.watch()
    stage.round()
    number = stage.watch()
    stage.follower.close()
    assert stage.kernel.closed
    assert number is not None
    assert stage.follower.buckets(number) is None


def test_failures_of_any_number_of_sources_are_counted_in_bounded_memory(stage: Stage) -> None:
    stage.load_fails = True
    for number in range(3000):
        stage.watch(source=f"/path/{number}")
        stage.now_ns += 5 * S
        stage.follower.step()
    assert stage.follower.failed == 3000
    assert len(stage.follower.failures) == 1024


def test_a_process_that_is_followed_already_is_not_identified_again(stage: Stage) -> None:
    stage.members[CHAT.key] = {1, 2}
    stage.begun()
    stage.identified.clear()
    stage.members[CHAT.key] = {1, 2, 3}
    stage.round()
    assert stage.identified == [3]


def test_the_gates_of_a_watch_are_said_once_and_again_when_they_or_its_number_change(stage: Stage) -> None:
    stage.follower.point(CHAT.key, 1)  # nothing is watched yet
    number = stage.begun()
    for slots in (1, 1, 3, 3):
        stage.follower.point(CHAT.key, slots)
    assert stage.kernel.pointed == [(number, 1), (number, 3)]
    stage.follower.forget(CHAT.key)
    stage.round()
    again = stage.begun()
    stage.follower.point(CHAT.key, 3)
    assert stage.kernel.pointed[2:] == [(again, 3)]
