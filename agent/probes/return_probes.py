# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether return probes are attached at all, and what is lost without them.

Invariant: no process ends or fails because it is watched. One probe serves every process that maps a file, and a
process may enter seccomp after that, so there is no choosing by process: they are attached everywhere or nowhere.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

LOST: Final = (
    "launches are counted, and memory is what NVML reports; not known are memory by kind, age and peak, PCIe bytes of "
    "containers, waits, names of kernels, what a graph holds, and which device a process means that uses several; so "
    "the signals gpu_wait and uprobe have no latency, deny and hold do nothing, stacks of allocations are refused"
)


class ReturnProbes(StrEnum):
    """The values of --return-probes."""

    AUTO = "auto"
    OFF = "off"


def no_returns(why: str | None) -> str | None:
    """Why something that needs a return cannot work; None: it can."""
    return None if why is None else f"return probes are off: {why}"


def why_off(choice: ReturnProbes) -> str | None:
    """Why no return probe may be attached; None: they may."""
    return "--return-probes off" if choice is ReturnProbes.OFF else None
