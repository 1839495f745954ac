# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""However many libraries come and go, no two have one number at once: by it the kernel finds where a denied call of a
library goes on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.errors import ProbeError
from agent.probes import libcuda as module
from agent.probes.attachment import ProbedFunction
from agent.probes.libcuda import AttachedLibrary, LibcudaProbes
from agent.probes.libraries import FileId, FileNumbers
from agent.probes.symbols import DENYING, PROGRAMS, SymbolRole

_MOST = 5
_COOKIE = 9 << 16
steps = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=200)


@given(steps)
def test_a_number_in_force_is_never_given_to_another_file(churn: list[tuple[bool, int]]) -> None:
    numbers, in_force = FileNumbers(_MOST, remembered=3), dict[int, int]()
    for comes, inode in churn:
        file = FileId(1, inode)
        if not comes:
            numbers.release(file)
            in_force.pop(inode, None)
        elif inode in in_force or len(in_force) < _MOST:
            assert numbers.take(file) == in_force.setdefault(inode, numbers.take(file))
        else:
            with pytest.raises(ProbeError, match="in force"):
                numbers.take(file)
        assert numbers.is_free == (len(in_force) < _MOST)
        assert len(set(in_force.values())) == len(in_force)
        assert all(1 <= number <= _MOST for number in in_force.values())


@given(steps)
def test_a_place_where_denied_calls_go_on_is_its_librarys_alone(churn: list[tuple[bool, int]]) -> None:
    """As LibcudaProbes writes them: put when a library comes, without replacing, and removed when it goes."""
    numbers, returns = FileNumbers(_MOST, remembered=2), dict[int, int]()
    in_force: dict[int, int] = {}
    for comes, inode in churn:
        file = FileId(1, inode)
        if comes and inode not in in_force and numbers.is_free:
            in_force[inode] = _COOKIE | numbers.take(file)
            assert in_force[inode] not in returns
            returns[in_force[inode]] = inode
        elif not comes and inode in in_force:
            del returns[in_force.pop(inode)]
            numbers.release(file)
        assert {cookie: inode for inode, cookie in in_force.items()} == returns


def test_an_hour_of_churn_gives_no_other_file_the_number_of_the_nodes_library() -> None:
    numbers, node = FileNumbers((1 << 16) - 1), FileId(1, 1)
    own = numbers.take(node)
    for inode in range(2, 70_000):
        file = FileId(1, inode)
        assert numbers.take(file) != own
        numbers.release(file)
    assert numbers.take(node) == own


def test_a_file_that_comes_back_has_the_number_that_processes_know() -> None:
    numbers = FileNumbers(100)
    first = numbers.take(FileId(1, 1))
    numbers.release(FileId(1, 1))
    assert [numbers.take(FileId(1, inode)) for inode in (2, 3)] != [first, first]
    assert numbers.take(FileId(1, 1)) == first


class Returns(dict[int, int]):
    """The map, with ctypes for keys."""

    def add(self, key: object, value: object) -> bool:
        cookie = int(getattr(key, "value", 0))
        if cookie in self:
            return False
        self[cookie] = int(getattr(value, "value", 0))
        return True


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Callable[[Returns], LibcudaProbes]:
    """Probes without anything but this map."""

    def make(returns: Returns) -> LibcudaProbes:
        probes = LibcudaProbes.__new__(LibcudaProbes)
        probes._numbers = FileNumbers(_MOST)
        monkeypatch.setattr(probes, "map", lambda _: returns, raising=False)
        return probes

    monkeypatch.setattr(module, "returns", lambda *_: {64: 7, 128: 8})
    return make


def test_a_cookie_that_is_in_use_is_reported_and_its_calls_are_held_instead(
    bare: Callable[[Returns], LibcudaProbes], caplog: pytest.LogCaptureFixture
) -> None:
    returns = Returns({5: 1000})
    probes, library = bare(returns), AttachedLibrary(1, "/opt/libcuda.so.1")
    allocating, at_return = PROGRAMS[SymbolRole.ALLOC]
    functions = [ProbedFunction(name, at, at // 64 + 4, allocating, at_return) for name, at in (("a", 64), ("b", 128))]
    entries = [one.entry for one in probes._denying(library, 0, functions)]
    assert entries == [allocating, DENYING]
    assert (returns, library.returns, probes.clashes) == ({5: 1000, 6: 8}, [6], 1)
    assert "cookie 0x5 is in use" in caplog.text
