# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Turns of one cgroup while somebody else undoes it: in whatever order the two act, nobody stays frozen for ever."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from agent.errors import WardenError
from enforce.duty import Duty, ForeignWriterError
from enforce.freezable import NotFreezableError
from enforce.freezer import Mark
from enforce.thawing import let_run

DEADLINE_SECONDS = 30.0
MOST_TURNING, MOST_UNDOING = 5, 6  # steps that each takes at most


class KilledError(Exception):
    """The process ends here."""


class Scripted:
    """A cgroup in memory. `order` says which thread takes the next step; who is not named waits for its end."""

    def __init__(self) -> None:
        self.asked = False
        self.written: Mark | None = None
        self.order: list[str] = []
        self.left: int | None = None  # steps until whoever takes them dies
        self._steps = threading.Condition()

    def is_asked(self) -> bool:
        with self._step():
            return self.asked

    is_touched = is_asked

    def freeze(self) -> None:
        with self._step():
            self.asked = True

    def thaw(self) -> None:
        with self._step():
            self.asked = False

    def claim(self) -> bool:
        with self._step():
            self.written = self.written or Mark.OURS
            return self.written is Mark.OURS

    def mark(self, mark: Mark) -> None:
        with self._step():
            self.written = mark

    def marked(self) -> Mark | None:
        with self._step():
            return self.written

    def unmark(self) -> None:
        with self._step():
            self.written = None

    def leave(self) -> None:
        """The calling thread takes no more steps."""
        me = threading.current_thread().name
        with self._steps:
            self.order = [name for name in self.order if name != me]
            self._steps.notify_all()

    @contextmanager
    def _step(self) -> Iterator[None]:
        me = threading.current_thread().name
        with self._steps:
            assert self._steps.wait_for(lambda: not self.order or self.order[0] == me, DEADLINE_SECONDS)
            self.order = self.order[1:]
            if self.left == 0:
                raise KilledError
            self.left = None if self.left is None else self.left - 1
            yield
            self._steps.notify_all()


def both(cgroup: Scripted, order: list[str], turning: Callable[[], object]) -> list[WardenError]:
    """A turn and an undoing at once, step by step in that order; what they raised."""
    raised: list[WardenError] = []

    def acting(act: Callable[[], object]) -> None:
        try:
            act()
        except WardenError as error:
            raised.append(error)
        finally:
            cgroup.leave()

    undoing: Any = cgroup
    cgroup.order = order
    acts = {"turning": turning, "undoing": lambda: let_run(undoing)}
    threads = [threading.Thread(target=acting, args=(act,), name=name) for name, act in acts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    return raised


def orders() -> Iterator[list[str]]:
    steps = MOST_TURNING + MOST_UNDOING
    for turning in itertools.combinations(range(steps), MOST_TURNING):
        yield ["turning" if step in turning else "undoing" for step in range(steps)]


def started(cgroup: Any) -> Duty:
    duty = Duty(cgroup, frozen_ns=10, thawed_ns=10)
    duty.start(0)
    return duty


def first(cgroup: Any, stale: Mark | None) -> tuple[Duty, Callable[[], object]]:
    cgroup.written = stale
    duty = Duty(cgroup, frozen_ns=10, thawed_ns=10)
    return duty, lambda: duty.start(0)


def freezing(cgroup: Any) -> tuple[Duty, Callable[[], object]]:
    duty = started(cgroup)
    assert duty.turn(10, allowed=True, steady=False)
    assert not cgroup.asked
    return duty, lambda: duty.turn(20, allowed=True, steady=False)


def thawing(cgroup: Any) -> tuple[Duty, Callable[[], object]]:
    duty = started(cgroup)
    return duty, lambda: duty.turn(10, allowed=True, steady=False)


SCENES: dict[str, Callable[[Any], tuple[Duty, Callable[[], object]]]] = {
    "the first turn": lambda cgroup: first(cgroup, None),
    "the first turn with a mark left over": lambda cgroup: first(cgroup, Mark.OURS),
    "a turn that freezes": freezing,
    "a turn that thaws": thawing,
}


@pytest.mark.parametrize("scene", SCENES)
def test_whoever_undoes_it_between_any_two_steps_of_a_turn_leaves_nobody_frozen_without_our_mark(scene: str) -> None:
    for order in orders():
        cgroup = Scripted()
        duty, turning = SCENES[scene](cgroup)
        raised = both(cgroup, order, turning)
        assert not any(isinstance(error, ForeignWriterError) for error in raised), order
        assert not cgroup.asked or (cgroup.written is Mark.OURS and duty.frozen), order
        if cgroup.asked:
            assert duty.turn(11, allowed=True, steady=True), order


def test_whoever_dies_after_any_step_of_a_turn_has_it_thawed_from_the_ledger() -> None:
    for begin, steps in itertools.product(SCENES.values(), range(MOST_TURNING)):
        cgroup: Any = Scripted()
        _, turning = begin(cgroup)
        cgroup.left = steps
        with suppress(KilledError):
            turning()
        cgroup.left = None
        let_run(cgroup)
        assert (cgroup.asked, cgroup.written) == (False, None)


def test_while_somebody_undoes_it_no_turns_begin() -> None:
    cgroup = Scripted()
    _, begin = first(cgroup, Mark.UNDOING)
    with pytest.raises(NotFreezableError, match="undone by somebody else"):
        begin()
    assert (cgroup.asked, cgroup.written) == (False, Mark.UNDOING)


def test_what_was_undone_before_its_mark_could_be_read_is_thawed_by_the_next_turn() -> None:
    class Unreadable(Scripted):
        def freeze(self) -> None:
            let_run(cgroup)
            super().freeze()
            self.marked = unreadable  # type: ignore[method-assign]

    def unreadable() -> Mark | None:
        del cgroup.marked
        raise OSError(errno.EIO, "input/output error")

    cgroup: Any = Unreadable()
    duty = Duty(cgroup, frozen_ns=10, thawed_ns=10)
    with pytest.raises(OSError, match="input/output"):
        duty.start(0)
    assert cgroup.asked
    assert not duty.turn(21, allowed=True, steady=True)
    assert not cgroup.asked


def test_what_somebody_else_freezes_after_it_was_undone_is_theirs() -> None:
    cgroup: Any = Scripted()
    duty = started(cgroup)
    let_run(cgroup)
    cgroup.freeze()
    assert not duty.turn(5, allowed=True, steady=True)
    assert cgroup.asked
