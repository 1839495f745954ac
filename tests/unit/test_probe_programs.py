# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""No program of a uprobe is without what keeps its stack its own thread's (bpf/probe.bpf.h)."""

from __future__ import annotations

import re
from pathlib import Path

BPF = Path(__file__).parents[2] / "bpf"
_BY_HAND = re.compile(r'SEC\("\??u(?:ret)?probe[^"]*"\)\s*\n\s*int (\w+)')
_SMALL = {"deny_probe"}  # it uses no stack: deny.bpf.c


def test_each_program_of_a_probe_is_defined_by_the_macro() -> None:
    sources = [*BPF.glob("*.bpf.c"), *BPF.glob("*.bpf.h")]
    by_hand = {name for path in sources for name in _BY_HAND.findall(path.read_text())}
    assert by_hand == _SMALL
    assert sum(len(re.findall(r"^PROBE\w*\(", path.read_text(), re.MULTILINE)) for path in sources) > 30
