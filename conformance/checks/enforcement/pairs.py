# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who shares the GPU in the item enforcement, pair by pair, the most telling first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from bench.enforcement.pairs import PAIRS
from conformance.clients.online import Program


@dataclass(frozen=True, slots=True)
class Pair:
    """Without a rate so many requests arrive as keep the service busy by LOAD_RATIO."""

    name: str
    online: Program
    offline: Program
    seconds: float  # its part of the time, in proportion to the others'
    rate_per_second: float | None = None

    @property
    def torch(self) -> bool:
        """Whether it needs PyTorch and a GPU that computes."""
        return self.online.torch or self.offline.torch


LOAD_RATIO: Final = 0.4


def _ours(name: str, bench_name: str, seconds: float) -> Pair:
    """One of the enforcement bench's pairs, with the same arguments."""
    pair = PAIRS[bench_name]
    return Pair(name, Program(pair.online), Program(pair.offline[0]), seconds, pair.rate_per_second)


ALL: Final = (
    Pair("encoder beside training", Program(("transformer",), True), Program(("train",), True), 80.0),
    _ours("spinning beside short kernels", "load50", 45.0),
    Pair("resnet beside long products", Program(("resnet",), True), Program(("long",), True), 55.0),
    _ours("spinning beside a deep queue", "deep", 20.0),
)
