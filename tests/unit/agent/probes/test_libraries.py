# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""No container can leave the libraries of others without a place, nor have any number of its own files kept or watched.

The kernel's side is not there: what is attached is only counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import ProbeError
from agent.core.model import HOST, ContainerKey, ProcessId
from agent.node.elf import Extent
from agent.node.procfs import Procfs
from agent.probes import libcuda as module
from agent.probes.libcuda import AttachedLibrary, LibcudaProbes
from agent.probes.libraries import FileId, FileNumbers, OpenFile


class Kernel:
    """In place of the BPF object, its maps, and inotify."""

    def __init__(self) -> None:
        self.watches = 0
        self._numbers = count(1)  # inotify gives none out twice

    def attach(self, program: str) -> None:
        """Nothing."""

    def attach_uprobes(self, *_: object, **__: object) -> list[object]:
        return []

    def detach_all(self, links: Iterable[object]) -> None:
        assert not list(links)

    def map(self, *_: object) -> Kernel:
        return self

    def delete(self, _: object) -> None:
        """Nothing."""

    def put(self, *_: object) -> None:
        """Nothing."""

    def watch(self, _descriptor: int, _path: str) -> int:
        self.watches += 1
        return next(self._numbers)

    def forget(self, _watch: int) -> None:
        self.watches -= 1

    def close(self) -> None:
        """Nothing."""


class Table:
    """The probes, shown files of containers: `show(container, file)`; odd files cannot be read."""

    def __init__(self, probes: LibcudaProbes, kernel: Kernel) -> None:
        self.probes, self.kernel = probes, kernel
        self.reads = 0

    def show(self, container: int | None, number: int) -> AttachedLibrary:
        process = ProcessId(container, 1) if container is not None else None
        file = OpenFile(0, f"/opt/{number}/libcuda.so.1", FileId(1, number), (4096, 0))
        return self.probes._ensure(file, process)

    def read(self, *_: object) -> dict[str, Extent]:
        self.reads += 1
        return {"cuInit": Extent(64, 0)}

    def refuse(self, *_: object) -> dict[str, Extent]:
        self.reads += 1
        raise ProbeError("it is not an ELF library that can be probed")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    kernel: Any = Kernel()
    monkeypatch.setattr(module, "_load", lambda *_: kernel)
    monkeypatch.setattr(module, "_can_deny", lambda _: False)
    monkeypatch.setattr("agent.probes.abi.check", lambda _: None)
    monkeypatch.setattr(module, "_MOST_LIBRARIES", 100)
    with LibcudaProbes(Path("none.bpf.o"), Procfs()) as probes:
        probes._files.changes.close()
        probes._files.changes = kernel
        owners: Any = Owners()
        probes._owners = owners
        yield Table(probes, kernel)


class Owners:
    """A process's number is its container's; 0 is the host."""

    def container_of(self, process: ProcessId) -> Any:
        key = ContainerKey(f"docker:{process.tgid}") if process.tgid else HOST
        return type("Container", (), {"key": key})


@pytest.fixture
def readable(table: Table, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def choose(are: bool) -> None:
        monkeypatch.setattr(module, "exported_extents", table.read if are else table.refuse)
        monkeypatch.setattr(module, "places", lambda *_: {})

    choose(True)
    return choose


@pytest.mark.usefixtures("readable")
def test_a_container_with_any_number_of_libraries_leaves_places_for_others(table: Table) -> None:
    results = [table.show(1, number) for number in range(1000)]
    assert len(table.probes.libraries()) == table.kernel.watches == table.reads == 32
    assert table.probes.refused == 1000 - 32
    assert "more than 32 copies of libcuda in docker:1" in results[-1].failed["*"]
    assert not table.show(2, 2000).unreadable
    assert not table.show(2, 5).unreadable, "one that is probed already is probed for every process"


@pytest.mark.usefixtures("readable")
def test_a_library_for_which_no_number_is_free_is_refused_and_counted_until_one_is(table: Table) -> None:
    table.probes._numbers = FileNumbers(3)
    first = [table.show(1, number) for number in range(3)]
    assert len({library.number for library in first}) == 3
    assert "numbers of libraries are in force" in table.show(2, 9).failed["*"]
    assert table.probes.refused == 1
    table.probes.drop(first[0])
    assert table.show(2, 9).number == first[0].number


@pytest.mark.usefixtures("readable")
def test_what_is_beyond_all_places_is_neither_kept_nor_watched_nor_read_and_the_nodes_own_has_one(table: Table) -> None:
    for number in range(1000):
        table.show(1 + number % 20, number)
    assert len(table.probes.libraries()) == table.kernel.watches == table.reads == 100
    assert table.probes.refused == 900
    assert not table.show(None, 2000).unreadable


@pytest.mark.usefixtures("readable")
def test_a_place_that_is_given_back_is_had_by_the_next(table: Table) -> None:
    first, *_ = [table.show(1, number) for number in range(32)]
    assert table.show(1, 100).unreadable
    table.probes.drop(first)
    assert not table.show(1, 100).unreadable


def test_files_that_are_no_libraries_take_no_place_and_only_the_last_of_them_are_remembered(
    table: Table, readable: Callable[[bool], None]
) -> None:
    readable(False)
    for number in range(5000):
        table.show(1, number)
    assert len(table.probes.libraries()) == table.kernel.watches == 256
    assert table.reads == 5000
    table.show(1, 4999)
    assert table.reads == 5000, "one that is remembered is not read again"
    assert not table.probes.refused
    readable(True)
    assert table.show(1, 6000).number == 1, "no number is spent on what has no probes"
    for number in range(7000, 7200):
        table.show(2 + number % 50, number)
    assert sum(not library.unreadable for library in table.probes.libraries()) == 100


def test_a_file_that_is_rewritten_again_and_again_is_probed_ever_later_and_counted() -> None:
    rewritten, file, other = module._Rewritten(), FileId(1, 1), FileId(1, 2)
    now, attached = 0, []
    while now < 600 * NS_PER_SECOND:
        try:
            rewritten.require_rest(file, now)
            attached.append(now)
            rewritten.note(file, now)
        except ProbeError:
            pass
        rewritten.require_rest(other, now)  # no other one's waits
        now += NS_PER_SECOND // 10
    assert attached[1] - attached[0] <= NS_PER_SECOND  # a package that is written over once
    assert len(attached) < 18
    assert rewritten.put_off > 5000
    rewritten.require_rest(file, now + module._LONGEST_REST_NS)


def test_what_is_remembered_of_rewritten_files_is_bounded() -> None:
    rewritten = module._Rewritten()
    for number in range(10_000):
        rewritten.note(FileId(1, number), number)
    assert len(rewritten._known) == module._MOST_REWRITTEN
    assert rewritten.dropped == 10_000
