# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An allocation that NVIDIA's own libcuda is asked for returns "out of memory" and never runs, on a stock kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.node.elf import exported_extents
from agent.node.instructions import place
from tests.kernel.memory.quota_guest import build_guest
from tests.support.booting import or_skip, stock_images
from tools.harness import stock_kernels

_KERNEL = (6, 18)


@pytest.mark.parametrize("driver", ["550"], indirect=True)
def test_it_is_denied_where_the_probe_stands_behind_the_check(libcuda: Path, tmp_path: Path) -> None:
    with or_skip():
        kernels = stock_images(tmp_path / "archive", [(_KERNEL, (99, 0))])
    extent = exported_extents(str(libcuda), "cuMemAlloc_v2")["cuMemAlloc_v2"]
    code = libcuda.read_bytes()[extent.offset : extent.offset + extent.size_bytes]
    guest = build_guest(tmp_path, libcuda, place(code, _KERNEL, "x86_64").distance)
    (text,) = stock_kernels.boot(kernels, guest)
    lines = text.splitlines()
    assert "END" in lines, text[-2000:]
    assert not [line for line in lines if line.startswith("FAILED")], text
    assert "OK an allocation that does not fit is denied" in lines
    assert "OK so is every one of several threads" in lines
    assert "OK no process is denied or held once the lease is over" in lines
