# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""guest/guest.c, which looks at what a kernel makes of a quota: compiled, and in an initial file system for a boot."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from agent.node import preflight
from tests.support.booting import FLAGS
from tools.harness.stock_kernels import pack

_SOURCES = Path(__file__).parent / "guest"
_OBJECTS = ("gpuwarden.bpf.o", "deny.bpf.o")


def compile_guest(folder: Path) -> Path:
    """The program. Beside it lie its libcuda and the BPF objects."""
    library, program = folder / "libcuda.so.1", folder / "guest"
    shared = ["-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *FLAGS, *shared, "-o", library, _SOURCES / "libcuda.c"], check=True)
    subprocess.run(["gcc", *FLAGS, "-o", program, _SOURCES / "guest.c", library, "-lbpf", "-lpthread"], check=True)
    for name in _OBJECTS:
        shutil.copy(preflight.bpf_object().with_name(name), folder)
    return program


def build_guest(folder: Path, libcuda: Path | None = None, place: int = 0) -> Path:
    """An initial file system that runs it.

    `libcuda`: a real one, for guest.c to use instead of the one beside it; `place`: of probes on its functions.
    """
    program = compile_guest(folder)
    files = [folder / name for name in ("libcuda.so.1", *_OBJECTS)]
    if libcuda is None:
        return pack(folder, program, files)
    shutil.copy(libcuda, folder / "real.so")
    return pack(folder, program, [*files, folder / "real.so"], f"/t/real.so {place}")
