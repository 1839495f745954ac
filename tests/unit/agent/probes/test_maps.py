# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Maps are read in batches, into one buffer that is used again."""

from __future__ import annotations

import ctypes
import errno
from typing import Any

import pytest

from agent.probes import libbpf
from agent.probes.abi import U32, U64
from agent.probes.libbpf import Map


class Kernel:
    """In place of libbpf: one map, of which a call copies at most `most` entries."""

    def __init__(self, entries: dict[int, list[int]], most: int = 1 << 30) -> None:
        self._keys, self._values, self._most = list(entries), list(entries.values()), most
        self.buffers: list[int] = []  # of each call

    def bpf_map_lookup_batch(
        self, _fd: int, start: Any, after: Any, keys: int, values: int, count: Any, _options: None
    ) -> int:
        first = start._obj.value if start is not None else 0
        found = range(first, min(len(self._keys), first + min(self._most, count._obj.value)))
        for at, index in enumerate(found):
            U32.from_address(keys + 4 * at).value = self._keys[index]
            for place, value in enumerate(self._values[index]):
                U64.from_address(values + 8 * (at * len(self._values[index]) + place)).value = value
        self.buffers.append(keys)
        count._obj.value, after._obj.value = len(found), found.stop
        ctypes.set_errno(errno.ENOENT)
        return -1 if found.stop == len(self._keys) else 0


def opened(kernel: Kernel) -> Map:
    return Map(kernel, 3, U32, U64)  # type: ignore[arg-type]


def test_all_entries_are_read_in_several_batches() -> None:
    entries = {key: [key * key] for key in range(100)}
    kernel = Kernel(entries, most=30)
    assert {key.value: [value.value] for key, value in opened(kernel).items()} == entries
    assert len(kernel.buffers) == 4


def test_every_read_of_a_map_uses_the_same_buffer() -> None:
    kernel = Kernel({1: [1], 2: [2]})
    one = opened(kernel)
    for _ in range(3):
        assert len(list(one.items())) == 2
    assert len(set(kernel.buffers)) == 1


def test_a_read_within_a_read_does_not_disturb_it() -> None:
    kernel = Kernel({1: [1], 2: [2], 3: [3]}, most=2)
    one, seen = opened(kernel), []
    for key, value in one.items():
        assert sorted(other.value for _, other in one.items()) == [1, 2, 3]
        seen.append((key.value, value.value))
    assert seen == [(1, 1), (2, 2), (3, 3)]
    assert len(set(kernel.buffers)) == 2


def test_what_was_read_stays_when_the_buffer_is_used_again() -> None:
    one = opened(Kernel({1: [10]}))
    kept = list(one.items())
    one._lib = Kernel({7: [70]})  # type: ignore[assignment]
    assert next(iter(one.items()))[1].value == 70
    assert kept[0][1].value == 10


def test_a_read_that_was_given_up_gives_its_buffer_back() -> None:
    kernel = Kernel({1: [1], 2: [2]}, most=1)
    one = opened(kernel)
    for _ in one.items():
        break
    assert len(list(one.items())) == 2
    assert len(set(kernel.buffers)) == 1


def test_counts_of_all_cpus_come_with_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libbpf, "_possible_cpus", lambda: 4)
    kernel = Kernel({index: [index, 1, 0, 2] for index in range(40)})
    assert opened(kernel).per_cpu_array(30) == [index + 3 for index in range(30)]
    assert len(kernel.buffers) == 1
