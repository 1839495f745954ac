# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the backstop undoes, by the beats of agent and guardian; and that it does nothing while the guardian runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from enforce.actuators.undo import UndoResult, acts_where
from enforce.recovery import backstop
from enforce.recovery.backstop import LOOK_NS, STILL_NS, Backstop, Beats, Remaining, new_page, remaining

NS = st.integers(0, 1 << 62)
MS = 1_000_000


class Scene:
    """A backstop at a time of its own, and the acts that it undoes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns, self.undone = 1000 * MS, list[frozenset[str]]()
        monkeypatch.setattr(backstop, "undo_all", self._undo_all)
        self.beats = Beats(agent_ns=self.now_ns, guardian_ns=self.now_ns)
        self.it = Backstop(self.beats, Path("/nowhere/ledger"), 1, lambda: self.now_ns)
        slow = SimpleNamespace(start_if_due=lambda: self.undone.append(acts_where(quick=False)))
        monkeypatch.setattr(self.it, "_slow", slow)

    def _undo_all(self, _path: Path, acts: frozenset[str]) -> list[UndoResult]:
        self.undone.append(acts)
        return []

    def pass_ms(self, ms: int, *beating: str) -> None:
        """Looks every 100 ms; those that are named beat meanwhile."""
        for _ in range(ms * MS // LOOK_NS):
            self.now_ns += LOOK_NS
            for name in beating:
                setattr(self.beats, f"{name}_ns", self.now_ns)
            self.it.look()


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


@given(NS, NS, NS)
def test_the_backstop_undoes_nothing_while_the_guardian_runs_and_no_act_of_an_agent_that_runs(
    agent_ns: int, guardian_ns: int, now_ns: int
) -> None:
    found = remaining(agent_ns, guardian_ns, now_ns)
    assert (found is Remaining.NOTHING) == (now_ns - guardian_ns <= STILL_NS)
    if found is not Remaining.NOTHING:
        assert (found is Remaining.EVERYTHING) == (now_ns - agent_ns > STILL_NS)


def test_an_agent_that_hangs_is_the_guardians(scene: Scene) -> None:
    scene.pass_ms(5000, "guardian")
    assert scene.undone == []
    assert scene.beats.backstop_ns == scene.now_ns


def test_of_a_guardian_that_stands_still_only_the_stops_are_undone(scene: Scene) -> None:
    scene.pass_ms(600, "agent")
    assert scene.undone == [{"pace", "hold"}]
    assert scene.beats.releases == 2


def test_a_backstop_that_was_killed_while_it_resumed_is_followed_by_one_that_is_not_at_it(scene: Scene) -> None:
    scene.beats.releases = 7
    Backstop(scene.beats, Path("ledger.jsonl"), 1)
    assert scene.beats.releases == 8


def test_when_both_stand_still_everything_is_undone_again_and_again_until_one_goes_on(scene: Scene) -> None:
    scene.pass_ms(500)
    assert scene.undone == []
    scene.pass_ms(100)
    everything = [acts_where(quick=True), acts_where(quick=False)]
    assert scene.undone == everything
    scene.pass_ms(500)
    assert scene.undone == everything * 2
    scene.pass_ms(1000, "guardian")
    assert scene.undone == everything * 2


def test_after_the_whole_machine_stood_still_the_others_are_given_time_to_beat(scene: Scene) -> None:
    scene.now_ns += 60_000 * MS
    scene.it.look()
    scene.pass_ms(300, "agent", "guardian")
    assert scene.undone == []


def test_all_see_the_same_page() -> None:
    page = new_page()
    one, other = Beats.shared(page), Beats.shared(page)
    one.guardian_ns = 7
    assert (other.guardian_ns, other.agent_ns) == (7, 0)
