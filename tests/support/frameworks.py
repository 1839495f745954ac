# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""numba-cuda and cuda-python's bindings as `make frameworks` installs them, and ptxas, which comes with them.

Their programs run on the simulated GPU, where nothing is computed: no test may look at a value that a kernel would
have written.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

FETCHED = Path(__file__).parents[2] / "build" / "frameworks"
PYTHON = FETCHED / "venv" / "bin" / "python"
PROGRAMS = Path(__file__).parent / "programs"
AXPY = PROGRAMS / "axpy.ptx"


def skip_without() -> None:
    """Skips where they could not be had."""
    if not (FETCHED / "installed").exists():
        missing = FETCHED / "missing"
        reason = missing.read_text().strip() if missing.exists() else ""
        raise pytest.skip.Exception(f"no numba-cuda: {reason or 'run `make frameworks`'}")


def cubin(source: Path, made: Path, *options: str) -> Path:
    """PTX, compiled by ptxas: for the simulated GPU unless the options say another."""
    (ptxas,) = FETCHED.glob("venv/lib/python3.*/site-packages/nvidia/cuda_nvcc/bin/ptxas")
    subprocess.run([ptxas, *(options or ("-arch=sm_90",)), source, "-o", made], check=True)
    return made
