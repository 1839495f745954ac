# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Where an offline container stands on its rule's ladder. Pure: states and times in, wishes out.

`gate` and `pace` always act; the steps above them are taken one at a time. One step replaces the milder one before it:
a container that is frozen could neither be locked nor end when it is asked to. Up while the promise is missed and the
law has nothing left to take; down when that has been over for a hold time, which doubles with each relapse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from agent.clock import NS_PER_SECOND

STEPS: Final = ("freeze", "lock", "swap", "evict")  # the mildest first; each replaces the one before it
FROM_THE_START: Final = ("mps",)  # no step: limits for clients that connect later
CLIMB_AFTER_NS: Final = 2 * NS_PER_SECOND
EVICT_AFTER_NS: Final = 30 * NS_PER_SECOND  # what cannot be taken back has to wait until all else had its time
HOLD_NS: Final = 10 * NS_PER_SECOND
MOST_HOLD_NS: Final = 600 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class Footing:
    """Where one container stands for the sake of latency. The default: on the ground."""

    step: str | None = None
    exhausted: bool = False
    since_ns: int = 0  # since when `exhausted` is as it is, or the last step, whichever is later
    hold_ns: int = HOLD_NS
    came_down_ns: int | None = None  # the last time; None: not since the last climb


def advance(
    footing: Footing, ladder: Sequence[str], exhausted: bool, able: Callable[[str], bool], now_ns: int
) -> Footing:
    """One decision: at most one step. `able` says of a step whether it can be done here and now."""
    if footing.step is not None and footing.step not in ladder:
        footing = Footing(exhausted=exhausted, since_ns=now_ns)
    if exhausted != footing.exhausted:
        return replace(footing, exhausted=exhausted, since_ns=now_ns)
    lasting_ns = now_ns - footing.since_ns
    if exhausted and lasting_ns >= CLIMB_AFTER_NS:
        return _up(footing, ladder, able, now_ns)
    if not exhausted and footing.step is not None and lasting_ns >= footing.hold_ns:
        below = [step for step in _above(None, ladder) if STEPS.index(step) < STEPS.index(footing.step)]
        return replace(footing, step=below[-1] if below else None, since_ns=now_ns, came_down_ns=now_ns)
    return footing


def _up(footing: Footing, ladder: Sequence[str], able: Callable[[str], bool], now_ns: int) -> Footing:
    step = next((step for step in _above(footing.step, ladder) if able(step)), None)
    if step is None:
        return replace(footing, since_ns=now_ns)  # asked again after as long: looking may be dear
    if step == "evict" and now_ns - footing.since_ns < EVICT_AFTER_NS:
        return footing
    down_ns = footing.came_down_ns
    hold_ns = footing.hold_ns
    if down_ns is not None:  # a relapse, unless the last time is long past
        hold_ns = min(MOST_HOLD_NS, 2 * hold_ns) if now_ns - down_ns <= MOST_HOLD_NS else HOLD_NS
    return Footing(step, True, now_ns, hold_ns)


def _above(step: str | None, ladder: Sequence[str]) -> list[str]:
    lowest = 0 if step is None else STEPS.index(step) + 1
    return [name for name in STEPS[lowest:] if name in ladder]


def strongest(ladder: Collection[str]) -> str | None:
    """The last step that the rule lists; for work that has to go."""
    return next((step for step in reversed(STEPS) if step in ladder), None)


Reasons = Mapping[str, str]  # rung → why it is wanted


def merged(ladder: Collection[str], wishes: Sequence[Reasons]) -> dict[str, str]:
    """All wishes for one container, those of one step reduced to the strongest. Only what the rule's ladder lists.

    The earlier wish's reason is kept where two want the same.
    """
    wanted: dict[str, str] = {}
    for wish in wishes:
        for rung, reason in wish.items():
            if rung in ladder:
                wanted.setdefault(rung, reason)
    steps = [step for step in STEPS if step in wanted]
    for milder in steps[:-1]:
        del wanted[milder]
    return wanted
