# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The ways of sharing that the enforcement bench compares, as data: what lies below, and which law acts, if any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ALONE: Final = "alone"
_HEADROOM: Final = "headroom@"
_STRICTEST: Final = 1.1
OWN_SETTLE: Final = {"headroom": 10.0, "tgs": 36.0}  # seconds until a law has found its share


@dataclass(frozen=True, slots=True)
class Mode:
    """One way. `target_ratio`: the SLO's target, to the p99 alone; modes without a law are judged by it too."""

    name: str
    mps: bool = False
    percentage: bool = False  # the offline side gets the complement of the online side's SM activity alone
    priority: bool = False  # the offline side is a client of below-normal priority
    law: str | None = None
    target_ratio: float = _STRICTEST

    @property
    def settle_seconds(self) -> float:
        """Left out of what is measured, at the beginning of each phase."""
        return OWN_SETTLE.get(self.law or "", 1.0)


_FIXED: Final = {
    mode.name: mode
    for mode in (
        Mode(ALONE),
        Mode("timeslice"),
        Mode("mps", mps=True),
        Mode("mps_static", mps=True, percentage=True),
        Mode("mps_priority", mps=True, priority=True),
        Mode("tgs", law="tgs"),
    )
}
NAMES: Final = (*_FIXED, *(f"{_HEADROOM}{target}" for target in ("1.1", "1.5", "3")))


def mode_of(name: str) -> Mode:
    """ValueError says which there are. `headroom@T` takes any T above 1."""
    if name in _FIXED:
        return _FIXED[name]
    target = name.removeprefix(_HEADROOM)
    if target != name and target.replace(".", "", 1).isdigit() and float(target) > 1:
        return Mode(name, law="headroom", target_ratio=float(target))
    raise ValueError(f"there is no mode {name!r}; there are: {', '.join(NAMES)}")


def offline_percentage(online_sm_ratio: float) -> int:
    """Of the SMs, for the offline clients: what the online side leaves when it is alone (MuxFlow)."""
    return max(10, min(90, round(100 * (1 - online_sm_ratio))))
