# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""User space reads the kernel's structs only while both agree about every field."""

from __future__ import annotations

import ctypes as c

import pytest

from agent import layout
from agent.errors import ProbeError
from agent.probes import Probes


class Shifted(c.Structure):
    """LaunchValue with two fields swapped: the same size."""

    _fields_ = [
        ("blocks", c.c_uint64),
        ("launches", c.c_uint64),
        *layout.LaunchValue._fields_[2:],
    ]


class Longer(c.Structure):
    _fields_ = [*layout.LaunchValue._fields_, ("more", c.c_uint64)]


class Renamed(c.Structure):
    _fields_ = [("calls", c.c_uint64), *layout.LaunchValue._fields_[1:]]


def test_the_structs_are_those_of_the_object(probes: Probes) -> None:
    layout.check(probes.bpf)


@pytest.mark.parametrize("doctored", [Shifted, Longer, Renamed])
def test_a_struct_that_differs_is_refused_by_name(
    probes: Probes, monkeypatch: pytest.MonkeyPatch, doctored: type[c.Structure]
) -> None:
    monkeypatch.setitem(layout._MIRRORS, "launch_value", doctored)
    with pytest.raises(ProbeError, match=r"struct launch_value: .*make bpf"):
        layout.check(probes.bpf)


def test_a_struct_that_the_object_does_not_have_is_refused_by_name(
    probes: Probes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(layout._MIRRORS, "launch_price", layout.LaunchValue)
    with pytest.raises(ProbeError, match=r"launch_price.*make bpf"):
        layout.check(probes.bpf)


def test_every_struct_of_a_map_is_checked() -> None:
    checked = set(layout._MIRRORS.values())
    used = {struct for pair in layout.MAPS.values() for struct in pair if issubclass(struct, c.Structure)}
    assert used <= checked
