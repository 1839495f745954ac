# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who shares the GPU in the enforcement bench: an online service and the offline work beside it, pair by pair.

Shapes are those of tools/harness/workloads.py, whose contention was compared with published figures, and variations of
one trait each. A request is shorter than there, so that two thousand of them take eight seconds at half load.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tools.harness.workloads import RESNET_LIKE, WHISPER_LIKE

TRACE: Final = Path(__file__).parent / "traces" / "bursts.csv"

# 20 kernels of 100 µs = 2 ms: a full wave of 66.7 µs, and a little more in half of that. A BERT-like request, shorter.
SERVICE: Final = shlex.split("--kernels 20 --kernel-us 66.7 --blocks 284 --threads 1024")


@dataclass(frozen=True, slots=True)
class Pair:
    """One row of the bench."""

    name: str
    what: str
    online: tuple[str, ...]
    rate_per_second: float
    offline: tuple[tuple[str, ...], ...]  # arguments of each offline workload
    trace: bool = False  # arrivals as in the trace file
    stretch: float = 1.0  # of the measured time: slow arrivals need longer for as many requests
    rounds: int = 1  # of each phase, of which the middle one counts: where one pause of the machine moves the p99


def _pair(name: str, what: str, offline: str | list[str], rate: float = 250.0, online: str = "") -> Pair:
    arguments = shlex.split(offline) if isinstance(offline, str) else offline
    return Pair(name, what, tuple(shlex.split(online) if online else SERVICE), rate, (tuple(arguments),))


_RESNET: Final = tuple(RESNET_LIKE)
_GRAPHS: Final = "--kernels 4 --graph 8 --kernel-us 50 --blocks 200 --threads 1024 --host-us 300"
_DEEP: Final = "--kernels 400 --kernel-us 250 --jitter 0.5 --blocks 132 --threads 1024"
_COPIES: Final = "--kernels 2 --kernel-us 250 --jitter 0.5 --blocks 132 --threads 1024 --copy-bytes 24MiB"
_SHORT: Final = "--kernels 10 --kernel-us 60 --jitter 0.3 --blocks 132 --threads 1024 --host-us 200"

PAIRS: Final[Mapping[str, Pair]] = MappingProxyType(
    {
        pair.name: pair
        for pair in (
            _pair("short", "offline kernels of 60 µs", _SHORT),
            _pair("long", "offline kernels of 7 to 11 ms", list(WHISPER_LIKE)),
            replace(
                _pair("bursts", "arrivals in bursts to 75 % load, from a trace", list(RESNET_LIKE), 120.0),
                trace=True,
                stretch=2.0,
            ),
            replace(
                _pair("overload", "the same, and more arrives in a burst than can be served", list(RESNET_LIKE), 160.0),
                trace=True,
                stretch=1.6,
                rounds=3,
            ),
            _pair("graphs", "both launch CUDA graphs", _GRAPHS, online=shlex.join([*SERVICE, "--graph"])),
            _pair("deep", "400 launches, 100 ms of work, queued before each wait", _DEEP),
            _pair("copies", "both copy a lot", _COPIES, online=shlex.join([*SERVICE, "--copy-bytes", "2MiB"])),
            replace(_pair("load20", "online at 20 % load", list(RESNET_LIKE), 100.0), stretch=2.5),
            _pair("load50", "online at 50 % load", list(RESNET_LIKE)),
            replace(_pair("load80", "online at 80 % load", list(RESNET_LIKE), 400.0), rounds=3),
            replace(
                _pair("two", "two offline beside one online", list(RESNET_LIKE)),
                offline=(_RESNET, tuple(shlex.split(_GRAPHS))),
            ),
        )
    }
)
