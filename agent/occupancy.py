# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Which part of a device's SMs a launch keeps busy while it runs. Pure."""

from __future__ import annotations

_THREADS_PER_SM = 2048  # V100 to B200; consumer parts hold 1,536, which makes this a little low there
_BLOCKS_PER_SM = 32


def sm_fraction(blocks: float, threads_per_block: int, sm_count: int | None) -> float:
    """Mean share of the SMs over the launch's waves, 0–1; 1 where the device's SM count is unknown.

    Blocks are spread over the SMs first and stacked then, so up to one block per SM every block takes an SM.
    """
    if not sm_count or blocks <= 0:
        return 1.0
    per_sm = max(1, min(_BLOCKS_PER_SM, _THREADS_PER_SM // max(1, threads_per_block)))
    full, rest = divmod(blocks, sm_count * per_sm)
    waves = full + (1 if rest else 0)
    return min(1.0, (full * sm_count + min(rest, sm_count)) / (waves * sm_count))
