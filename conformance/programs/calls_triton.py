# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Triton, launching one kernel a known number of times. PyTorch only holds the memory."""

import torch
import triton
import triton.language as tl
from calls_protocol import own_stdout, serve

LAUNCHES = 100
SIZE, BLOCK = 1 << 16, 1024


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def double(x, y, n, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """y = 2 x"""
    at = tl.program_id(0) * block + tl.arange(0, block)
    inside = at < n
    tl.store(y + at, 2 * tl.load(x + at, mask=inside), mask=inside)


def main() -> None:
    """Compiles it first."""
    answers = own_stdout()
    x = torch.ones(SIZE, device="cuda")
    y = torch.empty_like(x)

    def phase() -> dict[str, int]:
        for _ in range(LAUNCHES):
            double[(SIZE // BLOCK,)](x, y, SIZE, block=BLOCK)
        torch.cuda.synchronize()
        return {"launches": LAUNCHES}

    phase()
    if float(y.sum()) != 2.0 * SIZE:
        raise SystemExit("the kernel did not do what it is to do")
    torch.cuda.synchronize()
    serve(answers, {"version": triton.__version__}, {"kernels": phase})


if __name__ == "__main__":
    main()
