# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`numba_axpy.py STEPS`: what people write with numba-cuda. Runs on any GPU; on the simulated one nothing is computed.

A kernel that numba compiles, arrays on the device, copies both ways, a stream, events. It says in a line of JSON what
it did, and keeps its arrays until its stdin ends. STEPS 0: works without end.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any

import numpy as np
from numba import cuda

ELEMENTS = 1 << 20
THREADS = 256
LAUNCHES = 10  # of a step


@cuda.jit  # type: ignore[untyped-decorator]
def axpy(factor: Any, x: Any, y: Any) -> None:
    i = cuda.grid(1)
    if i < x.size:
        y[i] += factor * x[i]


def main() -> None:
    steps = int(sys.argv[1])
    host = np.ones(ELEMENTS, dtype=np.float32)
    stream = cuda.stream()
    x = cuda.to_device(host, stream=stream)
    y = cuda.device_array_like(x)
    begin, end = cuda.event(), cuda.event()
    for _ in range(steps) if steps else itertools.count():
        begin.record(stream)
        for _ in range(LAUNCHES):
            axpy[ELEMENTS // THREADS, THREADS, stream](np.float32(2), x, y)
        end.record(stream)
        end.synchronize()
        assert begin.elapsed_time(end) > 0
    y.copy_to_host(host, stream=stream)
    stream.synchronize()
    cuda.synchronize()
    done = {"launches": steps * LAUNCHES, "to_device": host.nbytes, "to_host": host.nbytes, "memory": 2 * host.nbytes}
    print(json.dumps(done), flush=True)
    sys.stdin.read()


main()
