# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The programs of tests/hostile/programs, compiled for the tests and for the bench beside them."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

from tools.harness.node import BUILD

PROGRAMS: Final = Path(__file__).resolve().parents[2] / "tests" / "hostile" / "programs"


def compile_program(name: str, folder: Path, *flags: str) -> Path:
    """The C program of that name, compiled against the simulated libcuda as any is against the real one.

    Once for each folder.
    """
    path, sim = folder / name, BUILD.parent
    if not path.exists():
        warn = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", f"-I{sim / 'include'}"]
        libraries = [f"-L{BUILD / 'lib'}", "-lcuda", "-lpthread"]
        source = PROGRAMS / f"{name}.c"
        subprocess.run(["gcc", *warn, *flags, str(source), "-o", str(path), *libraries], check=True)
    return path


def pretended_libcuda(folder: Path) -> Path:
    """A tenant's own libcuda.so.1, which says success to everything (pretended_cuda.c)."""
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,--as-needed")
    return compile_program("pretended_cuda", folder, *flags).rename(folder / "libcuda.so.1")


def second_library(folder: Path) -> Path:
    """The program that goes on with another copy of the driver library (second_library.c)."""
    return gpu_program("second_library", folder)


def gpu_program(name: str, folder: Path) -> Path:
    """A program that works on the GPU as the workloads of sim/ do."""
    sim = BUILD.parent
    return compile_program(name, folder, "-Wl,--as-needed", f"-I{sim}", str(sim / "workloads/gpu.c"), "-ldl")


def static_library(folder: Path) -> Path:
    """The program with the driver library linked in (static_library.c)."""
    sim = BUILD.parent
    library = [*sorted((sim / "libcuda").glob("*.c")), sim / "libcuda/entries.S", sim / "workloads/gpu.c"]
    flags = ["-DPLAIN", "-fvisibility=hidden", f"-I{sim}", "-Wl,--as-needed", *map(str, library)]
    return compile_program("static_library", folder, *flags)
