# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether what was looked at over hours has grown: the beginning beside the end. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

WARM_UP_RATIO: Final = 0.2  # of the looks: what is learned and allocated once
_PART: Final = 4  # the first and the last quarter of the rest are compared


@dataclass(frozen=True, slots=True)
class Bound:
    """How much more there may be at the end: whichever is more."""

    more: float
    more_ratio: float = 0.0

    def holds(self, first: float, last: float) -> bool:
        """Whether it grew by no more."""
        return last - first <= max(self.more, self.more_ratio * first)


BOUNDS: Final[Mapping[str, Bound]] = {
    "agent_rss_mib": Bound(2, 0.04),
    "agent_fds": Bound(3),
    "agent_threads": Bound(1),
    "guardian_rss_mib": Bound(1, 0.04),
    "guardian_fds": Bound(20),  # a pidfd for each process that it has stopped lately
    "maps_mib": Bound(0.5, 0.05),
    "run_dir_kib": Bound(400),  # the ledger is written anew above 1,000 lines that are done
    "series": Bound(200, 0.1),
    "known_containers": Bound(5),
    "known_processes": Bound(5),
    "sm_error": Bound(0.01),
    "engine_mib": Bound(1, 0.05),
    "tick_sm_error": Bound(0.005),
}
"""By figure. What is not here is shown and not judged."""


def compare(looks: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """A row for each figure: `figure`, `first`, `last` (medians), `least`, `most`, `flat`; ValueError without looks."""
    rest = looks[int(len(looks) * WARM_UP_RATIO) :]
    if not rest:
        raise ValueError("nothing was looked at")
    part = max(1, len(rest) // _PART)
    rows = []
    for name in dict.fromkeys(name for look in looks for name in look):
        values = [look[name] for look in rest if name in look]
        if not values:
            continue
        first, last = statistics.median(values[:part]), statistics.median(values[-part:])
        bound = BOUNDS.get(name)
        rows.append(
            {
                "figure": name,
                "first": round(first, 4),
                "last": round(last, 4),
                "least": round(min(values), 4),
                "most": round(max(values), 4),
                "flat": None if bound is None else bound.holds(first, last),
            }
        )
    return rows
