# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""enforce/signals/http_probe.py against the object that it mirrors."""

from __future__ import annotations

import ctypes as c
import re
from pathlib import Path

import pytest

from agent.core.errors import ProbeError
from agent.node import preflight
from agent.probes import abi
from agent.probes.libbpf import BpfObject
from enforce.policy import values
from enforce.signals.http_probe import CONNECTIONS, LONGEST_PATH, MAPS, MIRRORS, TALLIES, WATCHES, Follower

_HEADER = Path(__file__).parents[3] / "bpf" / "http.h"


def test_every_struct_and_map_has_the_objects_layout() -> None:
    with BpfObject(preflight.bpf_object().with_name("http.bpf.o")) as bpf:
        abi.check(bpf, MIRRORS)
        entries = {name: bpf.lib.bpf_map__max_entries(bpf._map(name)) for name in MAPS}
        entries["http_slots"] = bpf.lib.bpf_map__max_entries(bpf._map("http_slots"))
    assert entries["http_watches"] == entries["http_latencies"] == entries["http_counts"] == WATCHES
    assert entries["http_slots"] == WATCHES * CONNECTIONS
    assert entries["http_tallies"] == len(TALLIES)
    assert LONGEST_PATH == values.LONGEST_PATH


def test_a_struct_that_differs_is_refused() -> None:
    class Shifted(c.Structure):
        _fields_ = [("epoch", c.c_uint32), ("watch", c.c_uint32), ("is_child", c.c_uint32)]

    with (
        BpfObject(preflight.bpf_object().with_name("http.bpf.o")) as bpf,
        pytest.raises(ProbeError, match="struct http_follower"),
    ):
        abi.check(bpf, {"http_follower": Shifted})
    assert c.sizeof(Shifted) == c.sizeof(Follower)


def test_every_tally_has_its_name() -> None:
    names = re.findall(r"^\tHTTP_(\w+), /\*", _HEADER.read_text(), re.MULTILINE)
    assert tuple(name.lower() for name in names) == TALLIES
