# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What programs on numba-cuda use beside a launch. Runs on any GPU; an error of the driver ends it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda, float32

TABLE = np.arange(10, dtype=np.float32)


@cuda.jit(device=True)  # type: ignore[untyped-decorator]
def twice(value: Any) -> Any:
    return 2 * value


@cuda.jit  # type: ignore[untyped-decorator]
def reduce(x: Any, out: Any) -> None:
    part = cuda.shared.array(256, float32)
    table = cuda.const.array_like(TABLE)
    part[cuda.threadIdx.x] = x[cuda.grid(1)] + table[0]
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.atomic.add(out, 0, twice(math.sqrt(part[0])))


@cuda.jit  # type: ignore[untyped-decorator]
def dynamic(x: Any) -> None:
    part = cuda.shared.array(0, float32)
    part[cuda.threadIdx.x] = x[0]


def main() -> None:
    host = np.ones(4096, np.float32)
    x, out = cuda.to_device(host), cuda.to_device(np.zeros(1, np.float32))
    stream = cuda.stream()
    reduce[16, 256](x, out)
    reduce[16, 256](host, np.zeros(1, np.float32))  # numba copies both ways
    with stream.auto_synchronize():
        reduce[16, 256, stream](x, out)
    dynamic[1, 256, stream, 1024](x)
    event = cuda.event()
    event.record(stream)
    event.wait(cuda.default_stream())
    event.synchronize()
    assert event.query()
    with cuda.pinned(host):
        x.copy_to_device(host)
    cuda.pinned_array(100)
    cuda.mapped_array(100)
    cuda.managed_array(100)
    x[:100].copy_to_device(x[100:200])
    x[10:20].copy_to_host()
    cuda.as_cuda_array(x)
    x.get_ipc_handle()
    (compiled,) = reduce.overloads.values()
    assert compiled.max_threads_per_block == 1024
    assert compiled.shared_mem_per_block == 256 * 4
    assert compiled.regs_per_thread > 0
    cuda.profile_start()
    cuda.profile_stop()
    assert cuda.detect()
    free, total = cuda.current_context().get_memory_info()
    assert 0 < free < total
    cuda.synchronize()
    print("done")


main()
