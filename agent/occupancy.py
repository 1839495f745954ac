# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which part of a device's SMs a launch keeps busy while it runs. Pure."""

from __future__ import annotations

_THREADS_PER_SM = 2048  # V100 to B200; consumer parts hold 1,536, which makes this a little low there
_BLOCKS_PER_SM = 32


def waves(blocks: float, threads_per_block: int, sm_count: int) -> tuple[float, float]:
    """How often the SMs have to be filled, and Σ SMs that each wave keeps busy. bpf/waves.bpf.h does the same.

    Blocks are spread over the SMs first and stacked then, so up to one block per SM every block takes an SM.
    """
    per_sm = max(1, min(_BLOCKS_PER_SM, _THREADS_PER_SM // max(1, threads_per_block)))
    full, rest = divmod(blocks, sm_count * per_sm)
    return full + (1 if rest else 0), full * sm_count + min(rest, sm_count)


def sm_fraction(blocks: float, threads_per_block: int, sm_count: int | None) -> float:
    """Mean share of the SMs over the launch's waves, 0–1; 1 where the device's SM count is unknown."""
    if not sm_count or blocks <= 0:
        return 1.0
    count, busy = waves(blocks, threads_per_block, sm_count)
    return min(1.0, busy / (count * sm_count))
