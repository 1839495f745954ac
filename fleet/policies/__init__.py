# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Policies of the simulator, one a file: which job runs where, and which two share a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fleet.model import FleetError
from fleet.policies.bsbf import Bsbf
from fleet.policies.ffs import Ffs
from fleet.policies.fifo import Fifo
from fleet.policies.pairing import Pairing
from fleet.policies.sjf import Sjf
from fleet.policies.srtf import Srtf
from fleet.policies.tiresias import THRESHOLDS_GPU_S, Tiresias
from fleet.simulator.cluster import Policy


@dataclass(frozen=True, slots=True)
class Options:
    """What a policy can be given."""

    thresholds_gpu_s: tuple[float, ...] = THRESHOLDS_GPU_S
    """Of tiresias"""


BUILTIN: Final[Mapping[str, Callable[[Options], Policy]]] = {
    "fifo": lambda options: Fifo(),
    "sjf": lambda options: Sjf(),
    "srtf": lambda options: Srtf(),
    "srsf": lambda options: Srtf(by_gpus=True),
    "tiresias": lambda options: Tiresias(options.thresholds_gpu_s),
    "ffs": lambda options: Ffs(),
    "bsbf": lambda options: Bsbf(),
    "pairing": lambda options: Pairing(),
}
"""Name → policy"""


def build(name: str, options: Options) -> Policy:
    """FleetError: there is no such policy."""
    if name not in BUILTIN:
        raise FleetError(f"no policy is called {name!r}; there are: {', '.join(BUILTIN)}")
    return BUILTIN[name](options)
