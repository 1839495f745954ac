# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The programs of tests/hostile/programs, compiled for the tests and for the bench beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from tools.harness.node import SIM, compile_client

PROGRAMS: Final = Path(__file__).resolve().parents[2] / "tests" / "hostile" / "programs"


def compile_program(name: str, folder: Path, *flags: str) -> Path:
    """The C program of that name, compiled against the simulated libcuda as any is against the real one.

    Once for each folder.
    """
    path = folder / name
    return path if path.exists() else compile_client(PROGRAMS / f"{name}.c", path, "-g", "-O1", *flags)


def pretended_libcuda(folder: Path) -> Path:
    """A tenant's own libcuda.so.1, which says success to everything (pretended_cuda.c)."""
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,--as-needed")
    return compile_program("pretended_cuda", folder, *flags).rename(folder / "libcuda.so.1")


def second_library(folder: Path) -> Path:
    """The program that goes on with another copy of the driver library (second_library.c)."""
    return gpu_program("second_library", folder)


def gpu_program(name: str, folder: Path) -> Path:
    """A program that works on the GPU as the workloads of sim/ do."""
    return compile_program(name, folder, "-Wl,--as-needed", str(SIM / "workloads/gpu.c"), "-ldl")


def static_library(folder: Path) -> Path:
    """The program with the driver library linked in (static_library.c)."""
    library = [*sorted((SIM / "libcuda").glob("*.c")), SIM / "libcuda/entries.S", SIM / "workloads/gpu.c"]
    flags = ["-DPLAIN", "-fvisibility=hidden", "-Wl,--as-needed", *map(str, library)]
    return compile_program("static_library", folder, *flags)
