# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""/livez and /readyz: when the agent is alive, when it can be counted on, and why not."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from agent.core.model import ProbeStatus, Snapshot
from agent.exporters.liveness import START_NS, Health
from tests.support.snapshots import rich_snapshot

S = 1_000_000_000
NO_PROBES = replace(rich_snapshot(), probes=())
LIBRARY = rich_snapshot().probes[0]
BROKEN = replace(LIBRARY, attached=0)


@dataclass(slots=True)
class Agent:
    """One whose clock and snapshot the test sets."""

    now: int = 1000 * S
    snapshot: Snapshot | None = None
    decided: int | None = None
    interval: int = S
    health: Health = field(init=False)

    def __post_init__(self) -> None:
        self.health = Health(lambda: self.snapshot, lambda: self.decided, self.interval, lambda: self.now)

    def tick(self, probes: tuple[ProbeStatus, ...] = ()) -> None:
        self.snapshot = replace(NO_PROBES, at_ns=self.now, probes=probes)


def test_an_agent_that_starts_is_alive_for_a_while_and_not_ready() -> None:
    agent = Agent()
    agent.now += START_NS
    assert agent.health.not_alive() is None
    assert agent.health.not_ready() == "the first tick is not complete"
    agent.now += S
    assert agent.health.not_alive() == "no tick was completed in the 61 s since the start"


@pytest.mark.parametrize(("interval", "bound"), [(S // 10, 10.5), (S, 15), (60 * S, 310)])
def test_ticks_that_no_longer_complete_are_death_after_a_time_that_follows_the_interval(
    interval: int, bound: float
) -> None:
    agent = Agent(interval=interval)
    agent.tick()
    agent.now += int(bound * S)
    assert agent.health.not_alive() is None
    agent.now += S
    assert agent.health.not_alive() == f"no tick was completed for {bound + 1:.0f} s"
    agent.tick()
    assert agent.health.not_alive() is None


def test_a_loop_that_no_longer_decides_is_death_and_one_that_there_is_not_is_none() -> None:
    agent = Agent(decided=1000 * S)
    agent.now += 16 * S
    agent.tick()
    assert agent.health.not_alive() == "no decision was completed for 16 s"
    agent.decided = None
    assert agent.health.not_alive() is None


@pytest.mark.parametrize(
    ("probes", "why"),
    [
        ((), None),
        ((LIBRARY,), None),
        ((BROKEN, LIBRARY), None),
        ((BROKEN, BROKEN), "2 copies of libcuda were found and no probe could be attached: see the log"),
    ],
)
def test_it_is_ready_unless_libraries_were_found_and_none_could_be_probed(
    probes: tuple[ProbeStatus, ...], why: str | None
) -> None:
    agent = Agent()
    agent.tick(probes)
    assert agent.health.not_ready() == why
