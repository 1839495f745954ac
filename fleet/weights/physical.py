# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The prior: what a pair is worth by the online service's load, its gaps and the length of the offline kernels.

Invariant: a pair that cannot run (memory short, kernel longer than the slack and no MPS) has no weight, whatever was
measured of it. Formula: an offline job gets the time that is left, `1 - load`, less what each gap loses: resuming takes
c, and the online request that ends a gap waits for half a kernel on average, so work is lost unless the gap lasts
longer than `c + kernel / 2`. Gaps between requests are taken as exponential, which makes that `exp(-(c + kernel/2) /
gap)`. Under MPS both run at once, and the offline job gets the SMs that the online service leaves free: MuxFlow's
rule, where the SM activity of the online service alone sets the share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp
from typing import Final

from fleet.model import Job, Slot, Weight

RESUME_S: Final = 0.15e-3
"""From the online service's last kernel until offline kernels run again"""
ERROR: Final = 0.05
"""Mean absolute error that the node bench allows the prior: `python -m bench fleet-weights` judges it"""


@dataclass(frozen=True, slots=True)
class Physical:
    """The prior as a predictor."""

    reserve_bytes: int = 0
    """Memory of each GPU that stays free"""
    assumed_kernel_s: float | None = None
    """Kernel length of a job that nothing is known of; None: it gets no time-sliced GPU with an online service"""

    @property
    def name(self) -> str:
        return "physical"

    def fits(self, slot: Slot, job: Job) -> bool:
        """Whether the pair can run, as far as is known."""
        if job.memory_bytes > slot.free_bytes - self.reserve_bytes:
            return False
        kernel_s = self._kernel_s(job)
        return slot.online is None or slot.spatial is not None or kernel_s is None or kernel_s <= slot.slack_s

    def rows(self, slots: Sequence[Slot], jobs: Sequence[Job]) -> Iterator[list[float | None]]:
        """By slot and job; None: no pair, or the job's kernels, or the slot's figures, are unknown."""
        needs = [(self._kernel_s(job), job.memory_bytes) for job in jobs]
        for slot in slots:
            yield self._row(slot, needs)

    def _row(self, slot: Slot, needs: Sequence[tuple[float | None, int]]) -> list[float | None]:
        room_bytes = slot.free_bytes - self.reserve_bytes
        if slot.online is None or slot.spatial is not None:
            share = 1.0 if slot.online is None else _ratio(slot.spatial)
            return [share if memory_bytes <= room_bytes else None for _, memory_bytes in needs]
        left, gap_s, slack_s = _ratio(1 - slot.load), slot.gap_s, slot.slack_s
        if left is None or not gap_s > 0:  # not: NaN compares as false
            return [None] * len(needs)
        return [
            left * exp(-(RESUME_S + kernel_s / 2) / gap_s)
            if memory_bytes <= room_bytes and kernel_s is not None and kernel_s <= slack_s
            else None
            for kernel_s, memory_bytes in needs
        ]

    def weight(self, slot: Slot, job: Job) -> Weight | None:
        """The formula of the module, with its reason."""
        ((throughput,),) = self.rows((slot,), (job,))
        return None if throughput is None else Weight(throughput, ERROR, _why(slot))

    def _kernel_s(self, job: Job) -> float | None:
        return self.assumed_kernel_s if job.kernel_s is None else job.kernel_s


def _ratio(value: float | None) -> float | None:
    """A part of a GPU; None for what cannot be one."""
    return None if value is None or not value >= 0 else min(1.0, value)


def _why(slot: Slot) -> str:
    if slot.online is None:
        return "no online service on the GPU"
    if slot.spatial is not None:
        return f"{slot.online} leaves {slot.spatial:.0%} of the SMs"
    return f"{slot.online} leaves {1 - slot.load:.0%} of the time, in gaps of {slot.gap_s * 1e3:.3g} ms"
