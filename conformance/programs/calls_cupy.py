# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""CuPy, doing known things."""

from __future__ import annotations

import cupy
import numpy
from calls_protocol import own_stdout, serve

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


class Work:
    """A stream, a kernel, and what the kernel works on."""

    def __init__(self) -> None:
        self.twice = cupy.RawKernel(_SOURCE, "twice")
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.host = numpy.ones(SIZE, dtype=numpy.float32)
        with self.stream:
            self.x = cupy.asarray(self.host)
            self.y = cupy.empty_like(self.x)
        self._launch(1)
        self.stream.synchronize()
        if float(self.y.get().sum()) != 2.0 * SIZE:
            raise SystemExit("the kernel did not do what it is to do")
        with self.stream:
            self.stream.begin_capture()
            self._launch(3)
            self.graph = self.stream.end_capture()

    def _launch(self, times: int) -> None:
        with self.stream:
            for _ in range(times):
                self.twice((SIZE // BLOCK,), (BLOCK,), (self.x, self.y, numpy.int32(SIZE)))

    def kernels(self) -> dict[str, int]:
        """Launches and a wait."""
        self._launch(LAUNCHES)
        self.stream.synchronize()
        return {"launches": LAUNCHES, "waits": 1}

    def graphs(self) -> dict[str, int]:
        """Launches a graph of three kernels, and waits."""
        for _ in range(GRAPH_LAUNCHES):
            self.graph.launch(self.stream)
        self.stream.synchronize()
        return {"graph launches": GRAPH_LAUNCHES, "waits": 1}

    def copies(self) -> dict[str, int]:
        """There and back."""
        with self.stream:
            for _ in range(COPIES):
                self.x.set(self.host)
                self.y.get()
        self.stream.synchronize()
        return {"copies": 2 * COPIES}

    def memory(self) -> dict[str, int]:
        """Past the pool, which would keep it."""
        held = [cupy.cuda.memory.Memory(SEGMENT_BYTES) for _ in range(ALLOCATIONS)]
        count = len(held)
        held.clear()
        return {"allocations": count, "frees": count}


def main() -> None:
    """Everything once, then what is asked for."""
    answers = own_stdout()
    work = Work()
    phases = {"kernels": work.kernels, "graphs": work.graphs, "copies": work.copies, "memory": work.memory}
    for phase in phases.values():
        phase()
    serve(answers, {"version": cupy.__version__}, phases)


if __name__ == "__main__":
    main()
