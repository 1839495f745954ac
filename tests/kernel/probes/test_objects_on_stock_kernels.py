# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every object loads on kernels of distributions: what one verifier follows, an older one may not (guest/load.c)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from agent.node import preflight
from tests.support.booting import FLAGS, or_skip, stock_images
from tools.harness import stock_kernels

_SOURCE = Path(__file__).parent / "guest" / "load.c"
_OBJECTS = ("gpuwarden", "http", "stacks", "uprobe")
_KERNELS = {"6.1": ((6, 1), (6, 2)), "6.12": ((6, 12), (6, 13)), "7": ((7, 0), (8, 0))}


@pytest.fixture(scope="module")
def consoles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By kernel, what the guest wrote."""
    folder = tmp_path_factory.mktemp("guest")
    with or_skip():
        images = stock_images(tmp_path_factory.mktemp("archive"), _KERNELS.values())
    subprocess.run(["gcc", *FLAGS, "-o", folder / "guest", _SOURCE, "-lbpf"], check=True)
    objects = [preflight.bpf_object().with_name(f"{name}.bpf.o") for name in _OBJECTS]
    texts = stock_kernels.boot(images, stock_kernels.pack(folder, folder / "guest", objects))
    return dict(zip(_KERNELS, texts, strict=True))


@pytest.mark.parametrize("kernel", _KERNELS)
def test_its_verifier_takes_every_object(consoles: dict[str, str], kernel: str) -> None:
    lines = consoles[kernel].splitlines()
    assert "END" in lines, consoles[kernel][-2000:]
    assert [line for line in lines if line.startswith("OK ")] == [f"OK {name}" for name in _OBJECTS], consoles[kernel]
