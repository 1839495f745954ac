# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a storm does, drawn from a seed: whom it hurts, how, in which shortage, at which moment. Pure.

The same seed and number give the same acts, so that a failure can be tried again. How long the machine takes for what
goes before each act is the machine's: the moments are random in that as well.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Final


class Blow(StrEnum):
    """What is done to a process."""

    KILL = "kill"
    STOP = "stop"  # SIGSTOP; it goes on when all was seen to run
    OOM = "oom"  # a memory limit below what it needs: the kernel kills it


class Victims(StrEnum):
    """Whom it is done to, all at once."""

    AGENT = "agent"
    GUARDIAN = "guardian"
    BOTH = "both"
    BACKSTOP = "backstop"
    ALL = "all three"  # nothing undoes what is in force but `gpuwarden release` or the next start


class Shortage(StrEnum):
    """What lacks meanwhile."""

    NOTHING = "nothing"
    DISK = "disk"  # the file system of the run directory is full
    DESCRIPTORS = "descriptors"  # RLIMIT_NOFILE of agent, guardian and backstop is below what they have


class Moment(StrEnum):
    """The event that an act follows."""

    STEADY = "steady"  # an offline process is stopped
    START = "start"  # of the agent's first instruction
    RELOAD = "reload"  # a new policy and SIGHUP
    FREEZE = "freeze"  # a cgroup is frozen
    CHECKPOINT = "checkpoint"  # a process is being locked or saved
    ATTACH = "attach"  # the start of a program with a driver library that has no probes yet
    UPGRADE = "upgrade"  # SIGTERM to the agent and, within that time, the start of another one


MOST_DELAY_SECONDS: Final = {
    Moment.STEADY: 0.5,
    Moment.START: 3.0,
    Moment.RELOAD: 0.3,
    Moment.FREEZE: 0.1,
    Moment.CHECKPOINT: 0.3,
    Moment.ATTACH: 2.0,
    Moment.UPGRADE: 1.5,
}
CLOSED_RATIO: Final = 0.1  # of the agents that a storm starts have no stdin, stdout and stderr


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to hurt the agent; a row of the table."""

    blow: Blow
    victims: Victims
    shortage: Shortage = Shortage.NOTHING

    @property
    def name(self) -> str:
        """As the table shows it, and `--only` takes it."""
        lacking = f", no {self.shortage}" if self.shortage is not Shortage.NOTHING else ""
        return f"{self.blow} {self.victims}{lacking}"

    @property
    def ends_agent(self) -> bool:
        """Whether no agent enforces afterwards until one is started."""
        return self.blow is not Blow.STOP and self.victims in (Victims.AGENT, Victims.BOTH, Victims.ALL)

    @property
    def idles_agent(self) -> bool:
        """Whether no agent decides for as long as what is looked at."""
        return self.ends_agent or self.victims in (Victims.AGENT, Victims.BOTH)


# A freeze comes some ten seconds after an agent's start: more of those acts are such as it survives.
_KILLED = (
    *(Moment.STEADY,) * 7,
    *(Moment.START, Moment.RELOAD, Moment.ATTACH, Moment.UPGRADE) * 2,
    *(Moment.FREEZE, Moment.CHECKPOINT),
)
_STOPPED = (Moment.STEADY, Moment.STEADY, Moment.RELOAD, Moment.FREEZE, Moment.ATTACH)
_STEADY = (Moment.STEADY,)
WEIGHTS: Final[dict[Kind, tuple[int, tuple[Moment, ...]]]] = {  # how often, at which moments
    Kind(Blow.KILL, Victims.AGENT): (24, _KILLED),
    Kind(Blow.KILL, Victims.GUARDIAN): (
        22,
        (Moment.STEADY, Moment.STEADY, Moment.RELOAD, Moment.FREEZE, Moment.ATTACH),
    ),
    Kind(Blow.KILL, Victims.BOTH): (14, _KILLED),
    Kind(Blow.KILL, Victims.BACKSTOP): (4, _STEADY),
    Kind(Blow.KILL, Victims.ALL): (4, _KILLED),
    Kind(Blow.STOP, Victims.AGENT): (4, _STOPPED),
    Kind(Blow.STOP, Victims.GUARDIAN): (4, _STOPPED),
    Kind(Blow.STOP, Victims.BOTH): (6, _STOPPED),
    Kind(Blow.OOM, Victims.AGENT): (3, (Moment.STEADY, Moment.RELOAD)),
    Kind(Blow.OOM, Victims.BOTH): (3, _STEADY),
    Kind(Blow.KILL, Victims.AGENT, Shortage.DISK): (2, _STEADY),
    Kind(Blow.KILL, Victims.GUARDIAN, Shortage.DISK): (2, _STEADY),
    Kind(Blow.KILL, Victims.BOTH, Shortage.DISK): (2, _STEADY),
    Kind(Blow.KILL, Victims.AGENT, Shortage.DESCRIPTORS): (2, _STEADY),
    Kind(Blow.KILL, Victims.GUARDIAN, Shortage.DESCRIPTORS): (2, _STEADY),
    Kind(Blow.KILL, Victims.BOTH, Shortage.DESCRIPTORS): (2, _STEADY),
}


@dataclass(frozen=True, slots=True)
class Act:
    """One of a storm. `draw`: a number from 0 to 1 for what else there is to choose."""

    number: int
    kind: Kind
    moment: Moment
    delay_seconds: float
    draw: float


def plan(kills: int, seed: int, only: Collection[str] = ()) -> list[Act]:
    """The acts of a storm, in order. `only`: names of kinds; none: all."""
    random = Random(seed)
    kinds = [kind for kind in WEIGHTS if not only or kind.name in only]
    weights = [WEIGHTS[kind][0] for kind in kinds]
    return [_drawn(number, random.choices(kinds, weights)[0], random) for number in range(kills)]


def _drawn(number: int, kind: Kind, random: Random) -> Act:
    moment = random.choice(WEIGHTS[kind][1])
    return Act(number, kind, moment, random.uniform(0, MOST_DELAY_SECONDS[moment]), random.random())
