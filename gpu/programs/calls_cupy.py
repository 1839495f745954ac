# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""CuPy, doing known things."""

from __future__ import annotations

import cupy
import numpy
from calls_protocol import Phase, own_stdout, serve

LAUNCHES, GRAPH_LAUNCHES, COPIES, ALLOCATIONS = 100, 20, 10, 16
SIZE, BLOCK = 1 << 16, 256
SEGMENT_BYTES = 32 << 20
_SOURCE = """
extern "C" __global__ void twice(const float *x, float *y, int n)
{
	int i = blockDim.x * blockIdx.x + threadIdx.x;

	if (i < n)
		y[i] = 2 * x[i];
}
"""


def main() -> None:
    """Everything once, then what is asked for."""
    answers = own_stdout()
    twice = cupy.RawKernel(_SOURCE, "twice")
    stream = cupy.cuda.Stream(non_blocking=True)
    here = numpy.ones(SIZE, dtype=numpy.float32)
    with stream:
        x = cupy.asarray(here)
        y = cupy.empty_like(x)
    stream.synchronize()

    def launch() -> None:
        twice((SIZE // BLOCK,), (BLOCK,), (x, y, numpy.int32(SIZE)))

    def kernels() -> dict[str, int]:
        with stream:
            for _ in range(LAUNCHES):
                launch()
        stream.synchronize()
        return {"launches": LAUNCHES}

    def copies() -> dict[str, int]:
        with stream:
            for _ in range(COPIES):
                x.set(here)
                y.get()
        stream.synchronize()
        return {"copies": 2 * COPIES}

    def memory() -> dict[str, int]:
        held = [cupy.cuda.memory.Memory(SEGMENT_BYTES) for _ in range(ALLOCATIONS)]
        count = len(held)
        held.clear()
        return {"allocations": count, "frees": count}

    phases: dict[str, Phase] = {"kernels": kernels, "copies": copies, "memory": memory}
    for phase in phases.values():
        phase()
    if float(y.get().sum()) != 2.0 * SIZE:
        raise SystemExit("the kernel did not do what it is to do")
    with stream:
        stream.begin_capture()
        for _ in range(3):
            launch()
        graph = stream.end_capture()

    def graphs() -> dict[str, int]:
        for _ in range(GRAPH_LAUNCHES):
            graph.launch(stream)
        stream.synchronize()
        return {"graph launches": GRAPH_LAUNCHES}

    graphs()
    serve(answers, {"version": cupy.__version__}, {**phases, "graphs": graphs})


if __name__ == "__main__":
    main()
