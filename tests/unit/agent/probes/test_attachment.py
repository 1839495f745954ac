# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The one mechanism that attaches uprobes to the functions of a file. The kernel's side is not there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import cast

import pytest

from agent.core.errors import ProbeError
from agent.probes.attachment import Attachment, Attachments, ProbedFunction
from agent.probes.libbpf import BpfObject
from agent.probes.libraries import FileChanges, OpenFile

ALLOC, FREE = ProbedFunction("alloc", 64, 1, "enter", "leave"), ProbedFunction("free", 128, 2, "enter", None)


_PUSH, _NOP_5 = b"\x55\x48\x89\xe5", b"\x0f\x1f\x44\0\0"  # at ALLOC and FREE


class Kernel:
    """In place of the BPF object: a link is the program and the offsets; `refused` offsets take no probe."""

    def __init__(self) -> None:
        self.links: list[tuple[str, tuple[int, ...]]] = []
        self.detached: list[tuple[str, tuple[int, ...]]] = []
        self.refused: set[int] = set()

    def attach_uprobes(
        self, program: str, path: str, probes: Sequence[tuple[int, int]], *, at_return: bool
    ) -> list[tuple[str, tuple[int, ...]]]:
        assert Path(path).read_bytes(), "the very file that was looked into"
        assert at_return == (program == "leave")
        offsets = tuple(offset for offset, _ in probes)
        if self.refused & set(offsets):
            raise ProbeError(f"no probe at {offsets}")
        self.links.append((program, offsets))
        return [(program, offsets)]

    def detach_all(self, links: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        for link in links:
            self.links.remove(link)
            self.detached.append(link)


class Stage:
    """A file that can be attached to and written over."""

    def __init__(self, path: Path) -> None:
        self.path, self.kernel, self.dropped = path, Kernel(), list[Attachment]()
        self.attachments = Attachments(cast(BpfObject, self.kernel), self.dropped.append)
        self.descriptors: list[int] = []
        path.write_bytes(b"a program".ljust(64) + _PUSH.ljust(64) + _NOP_5.ljust(64))

    def opened(self) -> OpenFile:
        descriptor = os.open(self.path, os.O_RDONLY)
        self.descriptors.append(descriptor)
        return OpenFile.of(descriptor, str(self.path))

    def attach(self, *functions: ProbedFunction, purpose: str = "") -> Attachment:
        return self.attachments.attach(self.opened(), lambda _: functions, purpose)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "program")
    yield stage
    stage.attachments.close()
    for descriptor in stage.descriptors:
        os.close(descriptor)


def test_returns_are_attached_before_entries_and_detached_after_them(stage: Stage) -> None:
    attachment = stage.attach(ALLOC, FREE)
    assert stage.kernel.links == [("leave", (64,)), ("enter", (64, 128))]
    stage.attachments.drop(attachment)
    assert stage.kernel.detached == [("enter", (64, 128)), ("leave", (64,))]
    assert stage.dropped == [attachment]


def test_what_is_attached_is_found_again_and_only_for_its_purpose(stage: Stage) -> None:
    attachment = stage.attach(ALLOC, purpose="alloc")
    assert stage.attachments.find(stage.opened(), "alloc") is attachment
    assert stage.attachments.find(stage.opened(), "free") is None


def test_what_is_dropped_twice_is_detached_once(stage: Stage) -> None:
    attachment = stage.attach(ALLOC)
    stage.attachments.drop(attachment)
    other = stage.attach(FREE)
    stage.attachments.drop(attachment)
    assert stage.dropped == [attachment]
    assert stage.attachments.find(stage.opened(), "") is other


def test_a_function_that_the_kernel_refuses_takes_no_probe_from_the_others(stage: Stage) -> None:
    stage.kernel.refused = {64}
    attachment = stage.attach(ProbedFunction("alloc", 64, 1, "enter", None), FREE)
    assert stage.kernel.links == [("enter", (128,))]
    assert attachment.failed == {"alloc": "no probe at (64,)"}


def test_of_a_file_that_cannot_be_read_nothing_is_kept(stage: Stage) -> None:
    def unreadable(_: int) -> list[ProbedFunction]:
        raise ProbeError("not an ELF program")

    with pytest.raises(ProbeError, match="not an ELF program"):
        stage.attachments.attach(stage.opened(), unreadable)
    assert len(stage.attachments) == 0
    assert stage.attachments.find(stage.opened()) is None


def test_a_file_that_was_replaced_in_place_loses_all_its_probes_when_it_is_looked_for(stage: Stage) -> None:
    both = [stage.attach(ALLOC, purpose="alloc"), stage.attach(FREE, purpose="free")]
    stage.path.write_bytes(b"another program".ljust(300))
    assert stage.attachments.find(stage.opened(), "alloc") is None
    assert stage.dropped == both
    assert not stage.kernel.links


def test_a_file_whose_times_alone_have_changed_keeps_its_probes(stage: Stage) -> None:
    attachment = stage.attach(ALLOC, FREE)
    for second in range(3):
        os.utime(stage.path, ns=(second, second))
        assert stage.attachments.find(stage.opened(), "") is attachment
    assert stage.dropped == []


def test_what_is_written_beside_the_probed_code_costs_no_probe_and_one_byte_of_it_costs_all(stage: Stage) -> None:
    attachment = stage.attach(ALLOC, FREE)
    descriptor = os.open(stage.path, os.O_RDWR)
    stage.descriptors.append(descriptor)
    for value in range(50):
        os.pwrite(descriptor, bytes([value]), 0)
        os.pwrite(descriptor, os.pread(descriptor, 1, 64), 64)  # as it is
        assert stage.attachments.drop_changed(stage.attachments.changes.take()) == []
    os.pwrite(descriptor, b"\x90", 64)
    assert stage.attachments.drop_changed(stage.attachments.changes.take()) == [attachment]


def test_a_file_that_is_written_without_an_end_is_watched_no_more_and_compared_at_the_next_look(stage: Stage) -> None:
    attachment = stage.attach(ALLOC)
    descriptor = os.open(stage.path, os.O_RDWR)
    stage.descriptors.append(descriptor)
    for _ in range(1100):
        os.pwrite(descriptor, b"a", 0)
        stage.attachments.drop_changed(stage.attachments.changes.take())
    assert attachment.watch is None
    assert stage.attachments.find(stage.opened(), "") is attachment
    os.pwrite(descriptor, b"\x90", 64)
    assert stage.attachments.drop_changed(stage.attachments.changes.take()) == []
    os.utime(stage.path, ns=(1, 1))
    assert stage.attachments.find(stage.opened(), "") is None


def test_a_file_that_is_written_over_loses_its_probes_at_once(stage: Stage) -> None:
    other = Path(f"{stage.path}.other")
    other.write_bytes(b"another program")
    both = [stage.attach(ALLOC, purpose="alloc"), stage.attach(FREE, purpose="free")]
    stage.path, path = other, stage.path
    kept = stage.attach(ALLOC)
    assert stage.attachments.drop_changed(stage.attachments.changes.take()) == []
    path.write_bytes(b"new content")
    assert stage.attachments.drop_changed(stage.attachments.changes.take()) == both
    assert stage.attachments.find(stage.opened(), "") is kept
    assert stage.kernel.links == [("leave", (64,)), ("enter", (64,))]


def test_a_file_stays_watched_while_any_of_its_functions_has_probes(stage: Stage) -> None:
    first, second = stage.attach(ALLOC, purpose="alloc"), stage.attach(FREE, purpose="free")
    stage.attachments.drop(first)
    stage.path.write_bytes(b"new content")
    assert stage.attachments.drop_changed(stage.attachments.changes.take()) == [second]


def test_files_are_attached_where_the_kernel_grants_no_watch(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileChanges, "watch", lambda *_: None)
    attachment = stage.attach(ALLOC)
    assert stage.attachments.drop_changed({1, 2}) == []
    stage.attachments.drop(attachment)
    assert not stage.kernel.links


@pytest.mark.parametrize(("danger", "attached"), [(None, (64, 128)), ("processes die of it", (64,))])
def test_where_processes_die_of_it_no_probe_is_where_the_kernel_makes_a_call_of_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, danger: str | None, attached: tuple[int, ...]
) -> None:
    monkeypatch.setattr("agent.probes.attachment.danger", lambda: danger)
    attachment = stage.attach(ALLOC, FREE)
    assert stage.kernel.links == [("leave", (64,)), ("enter", attached)]
    assert attachment.failed == (
        {"free": "the kernel makes a call of its first instruction, and processes die of it"} if danger else {}
    )
