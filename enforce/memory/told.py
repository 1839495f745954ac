# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is said about memory: in the decision log, and to the agent's readers. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryDecision:
    """One act on a container for memory's sake. None: unknown."""

    wall_ns: int
    container: str
    device: str  # "": on any of its devices
    rule: str
    act: str  # "deny" | "hold" | "swap" | "evict" | "restore"
    count: int  # allocations that were denied or held since the last line's; 1 for what is done to a container
    held_bytes: int  # that it has
    source: str  # of held_bytes: "nvml" | "probes"
    quota_bytes: int | None
    reason: str
    acted: bool


@dataclass(frozen=True, slots=True)
class MemoryStance:
    """How a container stands with its memory."""

    quota_bytes: int | None
    denied: int
    held: int
