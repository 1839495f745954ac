# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""guest/guest.c, which looks at what a kernel makes of a quota: compiled, and in an initial file system for a boot."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agent.core.errors import SetupError
from agent.node import preflight
from tools.harness.stock_kernels import pack

_SOURCES = Path(__file__).parent / "guest"
_BPF = Path(__file__).parents[3] / "bpf"
FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{_BPF}")
"""For what runs in a guest"""


@contextmanager
def or_skip() -> Iterator[None]:
    """What a machine or Debian's archive lacks is a reason to skip."""
    try:
        yield
    except SetupError as error:
        pytest.skip(str(error))


def compile_guest(folder: Path) -> tuple[Path, list[Path]]:
    """The program, and what has to lie beside it: its libcuda and the BPF objects."""
    library, program = folder / "libcuda.so.1", folder / "guest"
    shared = ["-fPIC", "-shared", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["gcc", *FLAGS, *shared, "-o", library, _SOURCES / "libcuda.c"], check=True)
    subprocess.run(["gcc", *FLAGS, "-o", program, _SOURCES / "guest.c", library, "-lbpf", "-lpthread"], check=True)
    objects = (preflight.bpf_object().with_name(name) for name in ("gpuwarden.bpf.o", "deny.bpf.o"))
    return program, [library, *objects]


def build_guest(folder: Path, libcuda: Path | None = None, place: int = 0) -> Path:
    """An initial file system that runs it.

    `libcuda`: a real one, for guest.c to use instead of the one beside it; `place`: of probes on its functions.
    """
    program, files = compile_guest(folder)
    if libcuda is None:
        return pack(folder, program, files)
    shutil.copy(libcuda, folder / "real.so")
    return pack(folder, program, [*files, folder / "real.so"], f"/t/real.so {place}")
