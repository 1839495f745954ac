# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What one run of a scenario left behind, in the order in which it was seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agent.core.model import Snapshot
from bench.attribution.nvml import Listing


@dataclass(frozen=True, slots=True)
class Life:
    """A container that ran: `name` is its tenant's, `end_ns` None while it lives. CLOCK_MONOTONIC."""

    name: str
    id: str
    tgid: int
    begin_ns: int
    end_ns: int | None = None


@dataclass(frozen=True, slots=True)
class TruthSample:
    """SM time so far, by (tgid, UUID of the device)."""

    at_ns: int
    sm_ns: Mapping[tuple[int, str], int]


@dataclass(frozen=True, slots=True)
class Recording:
    """One run of a scenario. Each of the sequences is in order of time; the window lies between two snapshots."""

    lives: Sequence[Life]
    snapshots: Sequence[Snapshot]
    truth: Sequence[TruthSample]
    listings: Sequence[Listing]
    begin_ns: int
    end_ns: int

    @property
    def window_ns(self) -> int:
        """Length of the window."""
        return self.end_ns - self.begin_ns

    @property
    def measured(self) -> list[Snapshot]:
        """The snapshots whose ticks lie in the window."""
        return [s for s in self.snapshots if self.begin_ns < s.at_ns <= self.end_ns]
