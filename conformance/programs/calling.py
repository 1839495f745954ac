# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`calling.py FILE LOOP [LIBRARY]`: calls functions, and says how long a call takes.

They are machine code in the file (conformance/checks/probes/machine_code.py), or of the library, and take no arguments.
For each line `OFFSET COUNT` or `NAME COUNT` on its standard input a line of JSON: nanoseconds per call, and whether the
kernel had to step an instruction of it, which shows in the memory that it then maps into the process. Each line is a
process of its own, so that nothing is left of the line before.
"""

from __future__ import annotations

import ctypes as c
import json
import os
import sys
import time
from pathlib import Path

_READ_EXECUTE = 1 | 4  # PROT_*
_PRIVATE = 2  # MAP_*
_STEPPING_AREA = "[uprobes]"


def mapped(file: str) -> int:
    """The address of the file's bytes, as code. OSError."""
    libc = c.CDLL(None, use_errno=True)
    libc.mmap.restype = c.c_void_p
    libc.mmap.argtypes = [c.c_void_p, c.c_size_t, c.c_int, c.c_int, c.c_int, c.c_long]
    with open(file, "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        address = libc.mmap(None, size, _READ_EXECUTE, _PRIVATE, stream.fileno(), 0)
    if address in (None, c.c_void_p(-1).value):
        raise OSError(c.get_errno(), f"{file} cannot be mapped as code: {os.strerror(c.get_errno())}")
    return int(address)


def report_line(loop: int, function: int, count: int) -> str:
    """Times the calls; one line of figures."""
    call = c.CFUNCTYPE(None, c.c_uint64, c.c_void_p)(loop)
    call(1, function)  # the first fetches pages, and maps what the kernel needs
    started_ns = time.perf_counter_ns()
    call(count, function)
    took_ns = time.perf_counter_ns() - started_ns
    stepped = _STEPPING_AREA in Path("/proc/self/maps").read_text()
    return json.dumps({"ns": took_ns / count, "stepped": stepped})


def main() -> None:
    """Answers until its standard input ends."""
    code = mapped(sys.argv[1])
    library = c.CDLL(sys.argv[3]) if len(sys.argv) > 3 else None
    print("ready", flush=True)
    for line in sys.stdin:
        what, count = line.split()
        function = code + int(what) if what.isdecimal() else c.cast(getattr(library, what), c.c_void_p).value or 0
        child = os.fork()
        if child == 0:
            try:
                print(report_line(code + int(sys.argv[2]), function, int(count)), flush=True)
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"failed": f"the call ended with status {status}"}), flush=True)


if __name__ == "__main__":
    main()
