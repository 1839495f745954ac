# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who shares the GPU in the item enforcement, pair by pair, the most telling first.

A request takes about a millisecond, so that the 2,000 which a p99 wants are through in five seconds at 40 % load.
"""

from __future__ import annotations

import shlex
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
    seconds: float  # that all of its modes take; a pair that comes later gets what is left
    rate_per_second: float | None = None

    @property
    def torch(self) -> bool:
        """Whether it needs PyTorch and a GPU that computes."""
        return self.online.torch or self.offline.torch


LOAD_RATIO: Final = 0.4


# 10 kernels of 75 µs: three eighths of a request of the enforcement bench.
_SERVICE: Final = Program(tuple(shlex.split("--kernels 10 --kernel-us 50 --blocks 284 --threads 1024")))
_RATE_PER_SECOND: Final = 420.0
# Short sequences and few layers: what a BERT of 12 layers takes 3 ms for.
_ENCODER: Final = Program(("transformer", "--layers", "6", "--batch", "4", "--length", "128"), True)


def _ours(name: str, bench_name: str, seconds: float) -> Pair:
    """A short request beside the offline side of one of the enforcement bench's pairs."""
    return Pair(name, _SERVICE, Program(PAIRS[bench_name].offline[0]), seconds, _RATE_PER_SECOND)


ALL: Final = (
    Pair("encoder beside training", _ENCODER, Program(("train",), True), 100.0),
    _ours("spinning beside short kernels", "load50", 90.0),
    _ours("spinning beside a deep queue", "deep", 90.0),
)
