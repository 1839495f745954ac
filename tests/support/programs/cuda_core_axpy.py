# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""y[i] += factor * x[i] on cuda-python's own objects (cuda.core), from C++ that NVRTC compiles. Runs on any GPU."""

from __future__ import annotations

import numpy as np
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

ELEMENTS = 1 << 20
THREADS = 256
SOURCE = """
extern "C" __global__ void axpy(float factor, const float *x, float *y)
{
	size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;

	y[i] += factor * x[i];
}
"""


def main() -> None:
    device = Device()
    device.set_current()
    stream = device.create_stream()
    options = ProgramOptions(arch=f"sm_{device.arch}")
    kernel = Program(SOURCE, code_type="c++", options=options).compile("cubin").get_kernel("axpy")
    x, y = device.allocate(4 * ELEMENTS, stream=stream), device.allocate(4 * ELEMENTS, stream=stream)
    launch(stream, LaunchConfig(grid=ELEMENTS // THREADS, block=THREADS), kernel, np.float32(2), x, y)
    stream.record().sync()
    stream.sync()
    x.close(stream)
    y.close(stream)
    print("done")


main()
