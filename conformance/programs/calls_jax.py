# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""JAX, doing known things, and in phase `chains` things that XLA may put into graphs as it likes."""

from __future__ import annotations

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".05")  # of the GPU, which others use too
os.environ.setdefault("JAX_PLATFORMS", "cuda")

import jax
import jax.numpy as jnp
import numpy
from calls_protocol import Phase, own_stdout, serve

CALLS, COPIES = 50, 10
SIZE = 1 << 18


def main() -> None:
    """Everything once, then what is asked for."""
    answers = own_stdout()
    one_kernel = jax.jit(lambda x: 2 * x + 1)
    chain = jax.jit(lambda m: m @ jnp.tanh(m @ jnp.tanh(m @ jnp.tanh(m @ m))))
    host = numpy.ones(SIZE, dtype=numpy.float32)
    x = jax.device_put(host).block_until_ready()
    matrix = jnp.ones((256, 256), dtype=jnp.float32).block_until_ready()

    def kernels() -> dict[str, int]:
        for _ in range(CALLS):
            result = one_kernel(x)
        result.block_until_ready()
        return {"launches": CALLS}

    def chains() -> dict[str, int]:
        for _ in range(CALLS):
            result = chain(matrix)
        result.block_until_ready()
        return {}

    def copies() -> dict[str, int]:
        for _ in range(COPIES):
            there = jax.device_put(host).block_until_ready()
            numpy.asarray(there)
        return {"copies": 2 * COPIES}

    phases: dict[str, Phase] = {"kernels": kernels, "chains": chains, "copies": copies}
    for phase in phases.values():
        phase()
        phase()
    serve(answers, {"version": jax.__version__, "devices": str(jax.devices())}, phases)


if __name__ == "__main__":
    main()
