# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The position of an offline container on its rule's ladder. Pure: states and times in, wanted rungs out.

`gate` and `pace` always act; the steps above them are taken one at a time. One step replaces the milder one before it:
a frozen container could neither be locked nor end when it is asked to. Up while the SLO is missed and the law has
nothing left to take; down when that has been over for a hold time, which doubles with each relapse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agent.core.clock import NS_PER_SECOND
from agent.core.errors import WardenError
from agent.core.model import ContainerKey

STEPS: Final = ("freeze", "lock", "swap", "evict")  # the mildest first; each replaces the one before it
FROM_THE_START: Final = ("mps",)  # no step: limits for clients that connect later
CLIMB_AFTER_NS: Final = 2 * NS_PER_SECOND
EVICT_AFTER_NS: Final = 30 * NS_PER_SECOND  # an act that cannot be undone waits until all others had their time
HOLD_NS: Final = 10 * NS_PER_SECOND
MOST_HOLD_NS: Final = 600 * NS_PER_SECOND
UNDONE_SPAN_NS: Final = 20 * NS_PER_SECOND  # twice in so long, and not at once: no debugger that was attached
UNDONE_APART_NS: Final = NS_PER_SECOND // 2
UNDONE_HOLD_NS: Final = 60 * NS_PER_SECOND


@dataclass(frozen=True, slots=True)
class LadderState:
    """How far one container has been escalated for latency's sake. The default: not at all."""

    step: str | None = None
    exhausted: bool = False
    since_ns: int = 0  # since when `exhausted` is as it is, or the last step, whichever is later
    hold_ns: int = HOLD_NS
    came_down_ns: int | None = None  # the last time; None: not since the last climb


def advance(
    state: LadderState, ladder: Sequence[str], exhausted: bool, able: Callable[[str], bool], now_ns: int
) -> LadderState:
    """One decision: at most one step. `able`: whether a step can be done here and now."""
    if state.step is not None and state.step not in ladder:
        state = LadderState(exhausted=exhausted, since_ns=now_ns)
    if exhausted != state.exhausted:
        return replace(state, exhausted=exhausted, since_ns=now_ns)
    lasting_ns = now_ns - state.since_ns
    if exhausted and lasting_ns >= CLIMB_AFTER_NS:
        return _up(state, ladder, able, now_ns)
    if not exhausted and state.step is not None and lasting_ns >= state.hold_ns:
        below = [step for step in _above(None, ladder) if STEPS.index(step) < STEPS.index(state.step)]
        return replace(state, step=below[-1] if below else None, since_ns=now_ns, came_down_ns=now_ns)
    return state


def _up(state: LadderState, ladder: Sequence[str], able: Callable[[str], bool], now_ns: int) -> LadderState:
    step = next((step for step in _above(state.step, ladder) if able(step)), None)
    if step is None:
        return replace(state, since_ns=now_ns)  # tried again after as long: a check may be expensive
    if step == "evict" and now_ns - state.since_ns < EVICT_AFTER_NS:
        return state
    down_ns = state.came_down_ns
    hold_ns = state.hold_ns
    if down_ns is not None:  # a relapse, unless the last time is long past
        hold_ns = min(MOST_HOLD_NS, 2 * hold_ns) if now_ns - down_ns <= MOST_HOLD_NS else HOLD_NS
    return LadderState(step, True, now_ns, hold_ns)


def _above(step: str | None, ladder: Sequence[str]) -> list[str]:
    lowest = 0 if step is None else STEPS.index(step) + 1
    return [name for name in STEPS[lowest:] if name in ladder]


def strongest(ladder: Collection[str]) -> str | None:
    """The last step that the rule lists; for containers that have to go."""
    return next((step for step in reversed(STEPS) if step in ladder), None)


Reasons = Mapping[str, str]  # rung → why it is wanted


def merged(ladder: Collection[str], wishes: Sequence[Reasons]) -> dict[str, str]:
    """All that is wanted for one container; of the steps only the strongest. Only what the rule's ladder lists.

    Where two want the same rung, the earlier one's reason is kept.
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


@dataclass(frozen=True, slots=True)
class _UndoneStops:
    """Stops of one container that others ended so far, when that last grew, and until when `pace` is undone."""

    count: int
    grew_ns: int | None = None
    until_ns: int = 0

    def seen(self, count: int, now_ns: int) -> _UndoneStops:
        if count <= self.count:
            return replace(self, count=count)
        since_ns = None if self.grew_ns is None else now_ns - self.grew_ns
        if since_ns is not None and since_ns < UNDONE_APART_NS:
            return replace(self, count=count)
        again = (since_ns is not None and since_ns <= UNDONE_SPAN_NS) or now_ns < self.until_ns
        return _UndoneStops(count, now_ns, now_ns + UNDONE_HOLD_NS if again else self.until_ns)


class UndoneStops:
    """The containers whose stops others keep ending, by SIGCONT or a tracer: `pace` and `gate` do not hold them."""

    def __init__(self) -> None:
        self._seen: dict[ContainerKey, _UndoneStops] = {}

    def see(self, foreign: Mapping[ContainerKey, int], now_ns: int) -> list[ContainerKey]:
        """Once per decision: `foreign` stops of each container so far. Those that count as undone only from now on."""
        before = self._seen
        self._seen = {
            key: before[key].seen(count, now_ns) if key in before else _UndoneStops(0).seen(count, now_ns)
            for key, count in foreign.items()
        }
        was = {key for key, one in before.items() if now_ns < one.until_ns}
        return [key for key in self._seen if self.are(key, now_ns) and key not in was]

    def are(self, key: ContainerKey, now_ns: int) -> bool:
        """Whether the container's stops count as undone."""
        return key in self._seen and now_ns < self._seen[key].until_ns


@dataclass(frozen=True, slots=True)
class EscalationStatus:
    """What is done to one container beyond gate and pace (or would be), and what could not be done."""

    rungs: tuple[str, ...] = ()
    troubles: Mapping[str, str] = field(default_factory=dict)
    reasons: Reasons = field(default_factory=dict)  # of what is wanted


NOWHERE = EscalationStatus()


class UnfinishedError(WardenError):
    """A rung is in force but not finished: it is applied again soon. Not a failure."""
