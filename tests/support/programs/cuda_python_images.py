# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`cuda_python_images.py KERNEL IMAGE`: what the driver says of the image and of a kernel in it, as a line of JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from cuda.bindings import driver

Attribute = driver.CUfunction_attribute
ASKED = {
    "threads": Attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK,
    "shared_bytes": Attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
    "registers": Attribute.CU_FUNC_ATTRIBUTE_NUM_REGS,
    "arch": Attribute.CU_FUNC_ATTRIBUTE_BINARY_VERSION,
}


def report(kernel: str, image: Path, device: Any) -> dict[str, Any]:
    error, module = driver.cuModuleLoadData(image.read_bytes() + b"\0")
    library_error, library = driver.cuLibraryLoadData(image.read_bytes() + b"\0", [], [], 0, [], [], 0)
    said: dict[str, Any] = {"load": error.name, "load_library": library_error.name}
    if not error and not library_error:
        error, function = driver.cuModuleGetFunction(module, kernel.encode())
        library_error, same = driver.cuLibraryGetKernel(library, kernel.encode())
        said |= {"get": error.name, "get_kernel": library_error.name}
        for name, attribute in ASKED.items() if not error else ():
            said[name] = driver.cuFuncGetAttribute(attribute, function)[1]
            assert driver.cuKernelGetAttribute(attribute, same, device)[1] == said[name]
    return said


def main() -> None:
    driver.cuInit(0)
    device = driver.cuDeviceGet(0)[1]
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(device)[1])
    print(json.dumps(report(sys.argv[1], Path(sys.argv[2]), device)))


main()
