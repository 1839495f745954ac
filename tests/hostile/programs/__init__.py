# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a tenant may run to hurt others, each a file in C or Python that says the safe outcome below its licence."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tools.harness.node import BUILD


def compile_program(name: str, folder: Path, *flags: str) -> Path:
    """NAME.c, compiled against the simulated libcuda as any program is against the real one; once for each folder."""
    path, sim = folder / name, BUILD.parent
    if not path.exists():
        warn = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", f"-I{sim / 'include'}"]
        libraries = [f"-L{BUILD / 'lib'}", "-lcuda", "-lpthread"]
        source = Path(__file__).with_name(f"{name}.c")
        subprocess.run(["gcc", *warn, *flags, str(source), "-o", str(path), *libraries], check=True)
    return path


def pretended_libcuda(folder: Path) -> Path:
    """A tenant's own libcuda.so.1, which says success to everything (pretended_cuda.c)."""
    flags = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,--as-needed")
    return compile_program("pretended_cuda", folder, *flags).rename(folder / "libcuda.so.1")
