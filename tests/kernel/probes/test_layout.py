# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""User space reads the kernel's structs only while both agree about every field."""

from __future__ import annotations

import ctypes as c

import pytest

from agent.core.errors import ProbeError
from agent.probes import abi
from agent.probes.libcuda import LibcudaProbes


class Shifted(c.Structure):
    """LaunchValue with two fields swapped: the same size."""

    _fields_ = [
        ("blocks", c.c_uint64),
        ("launches", c.c_uint64),
        *abi.LaunchValue._fields_[2:],
    ]


class Longer(c.Structure):
    _fields_ = [*abi.LaunchValue._fields_, ("more", c.c_uint64)]


class Renamed(c.Structure):
    _fields_ = [("calls", c.c_uint64), *abi.LaunchValue._fields_[1:]]


def test_the_structs_are_those_of_the_object(probes: LibcudaProbes) -> None:
    abi.check(probes.bpf)


@pytest.mark.parametrize("doctored", [Shifted, Longer, Renamed])
def test_a_struct_that_differs_is_refused_by_name(
    probes: LibcudaProbes, monkeypatch: pytest.MonkeyPatch, doctored: type[c.Structure]
) -> None:
    monkeypatch.setitem(abi._MIRRORS, "launch_value", doctored)
    with pytest.raises(ProbeError, match=r"struct launch_value: .*make bpf"):
        abi.check(probes.bpf)


def test_a_struct_that_the_object_does_not_have_is_refused_by_name(
    probes: LibcudaProbes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(abi._MIRRORS, "launch_price", abi.LaunchValue)
    with pytest.raises(ProbeError, match=r"launch_price.*make bpf"):
        abi.check(probes.bpf)


def test_every_struct_of_a_map_is_checked() -> None:
    checked = set(abi._MIRRORS.values())
    used = {struct for pair in abi.MAPS.values() for struct in pair if issubclass(struct, c.Structure)}
    assert used <= checked
