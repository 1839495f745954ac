# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""agent/stacks/sampler.py against the object that it mirrors."""

from __future__ import annotations

import ctypes as c

import pytest

from agent.node import preflight
from agent.probes import abi
from agent.probes.libbpf import BpfObject
from agent.stacks.sampler import STACK_FRAMES, TALLIES, Addresses, Live, LiveKey, StackKey


@pytest.mark.parametrize(("name", "mirror"), [("stack_key", StackKey), ("live_key", LiveKey), ("live", Live)])
def test_every_struct_has_the_objects_layout(name: str, mirror: type[c.Structure]) -> None:
    with BpfObject(preflight.bpf_object().with_name("stacks.bpf.o")) as bpf:
        ours = {field[0]: getattr(mirror, field[0]).offset for field in mirror._fields_}
        assert abi._fields_in_btf(bpf, name) == (c.sizeof(mirror), ours)


def test_every_tally_has_a_place() -> None:
    with BpfObject(preflight.bpf_object().with_name("stacks.bpf.o")) as bpf:
        assert bpf.lib.bpf_map__max_entries(bpf._map("tallies")) == len(TALLIES)
    assert c.sizeof(Addresses) == STACK_FRAMES * 8
