# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The simulated libcuda has all that the newest real one at hand has, and gives it to those that ask for the same."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.harness.node import BUILD

NEWEST = "555"
_ROOT = Path(__file__).parents[2]
_NEWER = re.compile(
    r"cuCheckpoint|cu\w+Batch|cuStreamBeginRecapture|cuMemcpy\w*WithAttributes|cuCtxSynchronize_v2"
)  # of CUDA 12.8 and 13


def forms(libcuda: Path) -> set[str]:
    """By name and version of CUDA, what cuGetProcAddress gives; and the exports that it never gives."""
    command: list[str | Path] = [sys.executable, _ROOT / "sim/libcuda/unmodelled.py", "--all", libcuda]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())


@pytest.mark.parametrize("driver", [NEWEST], indirect=True)
def test_programs_get_the_same_form_of_every_call_as_from_the_real_library(libcuda: Path) -> None:
    real, simulated = forms(libcuda), forms(BUILD / "lib" / "libcuda.so.1")
    assert len(real) > 550
    assert real - simulated == set()
    assert [line for line in simulated - real if not _NEWER.search(line)] == []
