# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`cuda_python_axpy.py STEPS IMAGE`: the same on cuda-python's driver bindings, with a kernel that was compiled before.

IMAGE is a file of PTX or a cubin; PTX is loaded as a module, a cubin as a library.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver

BYTES = 4 << 20
THREADS = 256
LAUNCHES = 10  # of a step


def checked(answer: tuple[Any, ...]) -> Any:
    """The values of an answer without error."""
    if answer[0] != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(answer[0])
    return answer[1] if len(answer) == 2 else answer[1:]


def function_of(image: Path) -> Any:
    """The kernel `axpy` of it."""
    if image.suffix == ".ptx":
        module = checked(driver.cuModuleLoadData(image.read_bytes() + b"\0"))
        return checked(driver.cuModuleGetFunction(module, b"axpy"))
    library = checked(driver.cuLibraryLoadData(image.read_bytes(), [], [], 0, [], [], 0))
    return checked(driver.cuKernelGetFunction(checked(driver.cuLibraryGetKernel(library, b"axpy"))))


def main() -> None:
    steps, image = int(sys.argv[1]), Path(sys.argv[2])
    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))
    checked(driver.cuCtxSetCurrent(context))
    function = function_of(image)
    stream = checked(driver.cuStreamCreate(0))
    begin, end = checked(driver.cuEventCreate(0)), checked(driver.cuEventCreate(0))
    host = bytearray(BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    x, y = checked(driver.cuMemAlloc(BYTES)), checked(driver.cuMemAlloc(BYTES))
    checked(driver.cuMemcpyHtoDAsync(x, address, BYTES, stream))
    parameters = ((x, y, 2.0), (None, None, ctypes.c_float))
    for _ in range(steps) if steps else itertools.count():
        checked(driver.cuEventRecord(begin, stream))
        for _ in range(LAUNCHES):
            checked(
                driver.cuLaunchKernel(function, BYTES // 4 // THREADS, 1, 1, THREADS, 1, 1, 0, stream, parameters, 0)
            )
        checked(driver.cuEventRecord(end, stream))
        checked(driver.cuEventSynchronize(end))
        assert checked(driver.cuEventElapsedTime(begin, end)) > 0
    checked(driver.cuMemcpyDtoHAsync(address, y, BYTES, stream))
    checked(driver.cuStreamSynchronize(stream))
    checked(driver.cuCtxSynchronize())
    done = {"launches": steps * LAUNCHES, "to_device": BYTES, "to_host": BYTES, "memory": 2 * BYTES}
    print(json.dumps(done), flush=True)
    sys.stdin.read()


main()
