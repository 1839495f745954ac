# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which functions of libcuda a libcudart asks for: `python -m tools.runtime_functions FILE` prints the sorted list.

A line is the name, the version of CUDA whose form is asked for, and `per-thread` for that of per-thread default
streams. The file is loaded in a process of its own with a libcuda.so.1 (runtime_functions.c) that records what it is
asked for and has no device, so nothing runs. The lists in tests/fixtures/libcudart are what the probed functions are
checked against.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_RECORDER: Final = Path(__file__).with_suffix(".c")
_PER_THREAD = 2  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
_TIMEOUT_SECONDS = 60
_CHILD = """
import ctypes, sys
ctypes.CDLL(sys.argv[1]).cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))
"""


def asked_for(libcudart: Path) -> list[str]:
    """The lines of the list. Raises ChildProcessError with what the loader says where the file cannot be loaded."""
    with tempfile.TemporaryDirectory(prefix="gpuwarden-libcudart.") as folder:
        flags = ["-shared", "-fPIC", "-O1", "-Wl,-soname,libcuda.so.1"]
        subprocess.run(["gcc", *flags, _RECORDER, "-o", f"{folder}/libcuda.so.1"], check=True)
        environment = {**os.environ, "LD_LIBRARY_PATH": folder}
        command = [sys.executable, "-c", _CHILD, str(libcudart.resolve())]
        process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS)
    if process.returncode:
        raise ChildProcessError(f"{libcudart} cannot be loaded: {process.stderr.strip().splitlines()[-1]}")
    return sorted(set(_lines(process.stderr)))


def _lines(recorded: str) -> Iterator[str]:
    for line in recorded.splitlines():
        name, version, flags = line.split()
        yield f"{name} {version} per-thread" if int(flags) & _PER_THREAD else f"{name} {version}"


def main() -> int:
    """Exit code 1: the file cannot be loaded, and standard error says why; 2: no file was named."""
    if len(sys.argv) != 2:
        print("usage: python -m tools.runtime_functions LIBCUDART", file=sys.stderr)
        return 2
    try:
        lines = asked_for(Path(sys.argv[1]))
    except ChildProcessError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
