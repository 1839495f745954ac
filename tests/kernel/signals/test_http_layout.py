# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""agent/http/layout.py against the object that it mirrors."""

from __future__ import annotations

import ctypes as c
import re
from pathlib import Path

import pytest

from agent import layout, preflight
from agent.errors import ProbeError
from agent.http.layout import LONGEST_PATH, MAPS, MIRRORS, TALLIES, WATCHES, Follower
from agent.libbpf import BpfObject
from enforce.policy import places

_HEADER = Path(__file__).parents[2] / "bpf" / "http.h"


def test_every_struct_and_map_lies_as_the_object_says() -> None:
    with BpfObject(preflight.bpf_object().with_name("http.bpf.o")) as bpf:
        layout.check(bpf, MIRRORS)
        entries = {name: bpf.lib.bpf_map__max_entries(bpf._map(name)) for name in MAPS}
    assert entries["http_watches"] == entries["http_latencies"] == WATCHES
    assert entries["http_tallies"] == len(TALLIES)
    assert LONGEST_PATH == places.LONGEST_PATH


def test_a_struct_that_differs_is_refused() -> None:
    class Shifted(c.Structure):
        _fields_ = [("epoch", c.c_uint32), ("watch", c.c_uint32)]

    with (
        BpfObject(preflight.bpf_object().with_name("http.bpf.o")) as bpf,
        pytest.raises(ProbeError, match="struct http_follower"),
    ):
        layout.check(bpf, {"http_follower": Shifted})
    assert c.sizeof(Shifted) == c.sizeof(Follower)


def test_every_tally_has_its_name() -> None:
    names = re.findall(r"^\tHTTP_(\w+), /\*", _HEADER.read_text(), re.MULTILINE)
    assert tuple(name.lower() for name in names) == TALLIES
