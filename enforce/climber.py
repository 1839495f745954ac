# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Between the ladder and the rungs: who wishes what for which offline container, and what of it is in force.

Latency wishes by `enforce.ladder`; what memory and health wish is handed in. Only containers of an offline rule can be
wished anything, and only what their rule lists. Without rungs (`enforce: false`) it is only said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agent.model import ContainerKey, DeviceUuid
from enforce.actuators.freeze import Freeze
from enforce.decide import Decided, Verdict
from enforce.explainer import Explainer
from enforce.health import HealthView
from enforce.ladder import FROM_THE_START, Footing, Reasons, advance, merged, strongest
from enforce.model import Rung, Subject
from enforce.roster import Seat, subject_of
from enforce.rungs import Rungs
from enforce.standing import Standing

LATENCY = "the promise is missed with the least share"
ONLINE = "an online container is on its GPUs"
NOTHING: Reasons = {}


class Climber:
    """Everybody's footing. For the deciding thread alone."""

    def __init__(self, table: Mapping[str, Rung], rungs: Rungs | None) -> None:
        self._table, self._rungs = table, rungs
        self._footings: dict[ContainerKey, Footing] = {}
        self._wanted: dict[ContainerKey, Reasons] = {}
        self._obstacles: dict[ContainerKey, dict[str, str]] = {}  # step → why it was passed over, the last time

    def explained(self, explainer: Explainer) -> Explainer:
        """The same, with what is said here."""
        return replace(
            explainer,
            in_force=lambda key: frozenset(self.standing(key).rungs),
            troubles=lambda key: self.standing(key).troubles,
            also=self._reasons,
        )

    def losses(self) -> dict[str, int]:
        """What could not be done, or was done by others too: for Snapshot.lost."""
        freeze = self._table.get("freeze")
        foreign = {"freeze:foreign": freeze.foreign_writes} if isinstance(freeze, Freeze) else {}
        return {"rungs:failed": self._rungs.failures if self._rungs else 0, **foreign}

    def step(
        self,
        here: Mapping[ContainerKey, Seat],
        decided: Decided,
        now_ns: int,
        others: Sequence[Mapping[ContainerKey, Reasons]] = (),
    ) -> None:
        """Once per decision. `others`: what memory and health wish; where two wish the same, the earlier gives why."""
        subjects = {key: subject for key, seat in here.items() if (subject := subject_of(seat)) is not None}
        verdicts = {verdict.seat.container.key: verdict for verdict in decided.verdicts}
        self._footings = {
            key: self._advance(subjects[key], verdict, now_ns) for key, verdict in verdicts.items() if key in subjects
        }
        self._obstacles = {key: whys for key, whys in self._obstacles.items() if key in self._footings}
        self._wanted = {}
        for key, subject in subjects.items():
            wishes = [*(wish.get(key, NOTHING) for wish in others), self._by_latency(key, verdicts.get(key))]
            ladder = [rung for rung in subject.rule.ladder if rung in self._table]
            if wanted := merged(ladder, wishes):
                self._wanted[key] = wanted
        if self._rungs is not None:
            self._allow_freezing(others)
            self._rungs.want({key: (subjects[key], frozenset(wanted)) for key, wanted in self._wanted.items()})

    def standing(self, key: ContainerKey) -> Standing:
        """As of the last `step`; without rungs, what would be done."""
        wanted, obstacles = self._wanted.get(key, NOTHING), self._obstacles.get(key, {})
        if self._rungs is None:
            return Standing(tuple(wanted), obstacles, wanted)
        return Standing(tuple(sorted(self._rungs.in_force(key))), {**obstacles, **self._rungs.troubles(key)}, wanted)

    def let_go(self) -> None:
        """Has everything undone, waiting for none of it, and forgets where everybody stood."""
        self._footings, self._wanted, self._obstacles = {}, {}, {}
        if self._rungs is not None:
            self._allow_freezing([])
            self._rungs.want({})

    def release(self) -> None:
        """As `let_go`, and waits until everything that can be undone is: for the end."""
        self.let_go()
        if self._rungs is not None:
            self._rungs.release_all()

    def _advance(self, subject: Subject, verdict: Verdict, now_ns: int) -> Footing:
        key = subject.container.key
        troubles = self._rungs.troubles(key) if self._rungs else {}
        if not verdict.share.exhausted:
            self._obstacles.pop(key, None)  # nobody wants to climb
        obstacles = self._obstacles.setdefault(key, {})

        def able(step: str) -> bool:
            obstacle = self._table[step].obstacle(subject) if step in self._table else "it is not in this version"
            obstacles.pop(step, None)
            if obstacle is not None:
                obstacles[step] = obstacle
            return obstacle is None and step not in troubles

        footing = self._footings.get(key) or Footing(since_ns=now_ns)
        return advance(footing, subject.rule.ladder, verdict.share.exhausted, able, now_ns)

    def _by_latency(self, key: ContainerKey, verdict: Verdict | None) -> Reasons:
        if verdict is None:
            return NOTHING
        wishes = {name: ONLINE for name in FROM_THE_START if self._is_able(name, verdict)}
        step = self._footings[key].step if key in self._footings else None
        return wishes if step is None else {**wishes, step: LATENCY}

    def _is_able(self, name: str, verdict: Verdict) -> bool:
        """So that what became impossible is put back, and what became possible again set anew."""
        rung, subject = self._table.get(name), subject_of(verdict.seat)
        return rung is not None and subject is not None and rung.obstacle(subject) is None

    def _reasons(self, key: ContainerKey) -> tuple[str, ...]:
        wanted = self._wanted.get(key, NOTHING)
        return tuple(f"{rung}: {why}" for rung, why in wanted.items() if rung not in FROM_THE_START)

    def _allow_freezing(self, others: Sequence[Mapping[ContainerKey, Reasons]]) -> None:
        """Whom only latency wants frozen is thawed by turns, so that it keeps its floor."""
        freeze = self._table.get("freeze")
        if isinstance(freeze, Freeze):
            steady = {key for wishes in others for key, wish in wishes.items() if "freeze" in wish}
            freeze.allow({key: key in steady for key, wanted in self._wanted.items() if "freeze" in wanted})


def leaving(here: Mapping[ContainerKey, Seat], health: Mapping[DeviceUuid, HealthView]) -> dict[ContainerKey, Reasons]:
    """Who has to go for the sake of a device's health: the strongest step that the rule lists, online ones or not."""
    wishes: dict[ContainerKey, Reasons] = {}
    for key, seat in here.items():
        subject = subject_of(seat)
        unfit = [health[device] for device in seat.devices if device in health and health[device].must_leave]
        step = strongest(subject.rule.ladder) if subject is not None else None
        if unfit and step is not None:
            wishes[key] = {step: f"device {unfit[0].state}: {unfit[0].reason}"}
    return wishes
