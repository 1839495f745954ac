# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The cycle of one cgroup while another process undoes it: in whatever order both act, it does not stay frozen."""

from __future__ import annotations

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from agent.core.errors import WardenError
from agent.core.model import Container, ContainerKey
from agent.node.procfs import Procfs
from enforce.actuators.freezer.cgroup import FreezerCgroup, Mark, NotFreezableError, let_run
from enforce.actuators.freezer.rung import ForeignWriterError, Freeze, FreezeCycle, _ActiveCycle
from enforce.model import Subject

DEADLINE_SECONDS = 30.0
MOST_STEPPING, MOST_UNDOING = 5, 6  # steps that each takes at most


class KilledError(Exception):
    """The process ends here."""


class Scripted:
    """A cgroup in memory. `order` lists which thread takes the next step; one that is not named waits for its end."""

    def __init__(self) -> None:
        self.asked = False
        self.written: Mark | None = None
        self.order: list[str] = []
        self.left: int | None = None  # writes until the thread that makes them dies
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


def both(cgroup: Scripted, order: list[str], stepping: Callable[[], object]) -> list[WardenError]:
    """A step and an undoing at once, write by write in that order; what they raised."""
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
    acts = {"stepping": stepping, "undoing": lambda: let_run(undoing)}
    threads = [threading.Thread(target=acting, args=(act,), name=name) for name, act in acts.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    return raised


def orders() -> Iterator[list[str]]:
    steps = MOST_STEPPING + MOST_UNDOING
    for stepping in itertools.combinations(range(steps), MOST_STEPPING):
        yield ["stepping" if step in stepping else "undoing" for step in range(steps)]


def started(cgroup: Any) -> FreezeCycle:
    cycle = FreezeCycle(cgroup, frozen_ns=10, thawed_ns=10)
    cycle.start(0)
    return cycle


def first(cgroup: Any, stale: Mark | None) -> tuple[FreezeCycle, Callable[[], object]]:
    cgroup.written = stale
    cycle = FreezeCycle(cgroup, frozen_ns=10, thawed_ns=10)
    return cycle, lambda: cycle.start(0)


def freezing(cgroup: Any) -> tuple[FreezeCycle, Callable[[], object]]:
    cycle = started(cgroup)
    assert cycle.step(10, allowed=True, steady=False)
    assert not cgroup.asked
    return cycle, lambda: cycle.step(20, allowed=True, steady=False)


def thawing(cgroup: Any) -> tuple[FreezeCycle, Callable[[], object]]:
    cycle = started(cgroup)
    return cycle, lambda: cycle.step(10, allowed=True, steady=False)


STEPS: dict[str, Callable[[Any], tuple[FreezeCycle, Callable[[], object]]]] = {
    "the first step": lambda cgroup: first(cgroup, None),
    "the first step with a mark left over": lambda cgroup: first(cgroup, Mark.OURS),
    "a step that freezes": freezing,
    "a step that thaws": thawing,
}


@pytest.mark.parametrize("step_kind", STEPS)
def test_undone_between_any_two_writes_of_a_step_it_is_not_left_frozen_without_our_mark(step_kind: str) -> None:
    for order in orders():
        cgroup = Scripted()
        cycle, stepping = STEPS[step_kind](cgroup)
        raised = both(cgroup, order, stepping)
        assert not any(isinstance(error, ForeignWriterError) for error in raised), order
        assert not cgroup.asked or (cgroup.written is Mark.OURS and cycle.frozen), order
        if cgroup.asked:
            assert cycle.step(11, allowed=True, steady=True), order


def test_an_agent_that_dies_after_any_write_of_a_step_has_it_thawed_from_the_ledger() -> None:
    for begin, steps in itertools.product(STEPS.values(), range(MOST_STEPPING)):
        cgroup: Any = Scripted()
        _, stepping = begin(cgroup)
        cgroup.left = steps
        with suppress(KilledError):
            stepping()
        cgroup.left = None
        let_run(cgroup)
        assert (cgroup.asked, cgroup.written) == (False, None)


def test_while_a_freeze_is_being_undone_no_cycle_begins() -> None:
    cgroup = Scripted()
    _, begin = first(cgroup, Mark.UNDOING)
    with pytest.raises(NotFreezableError, match="being undone from the ledger"):
        begin()
    assert (cgroup.asked, cgroup.written) == (False, Mark.UNDOING)


def test_what_was_undone_before_its_mark_could_be_read_is_thawed_by_the_next_step() -> None:
    class Unreadable(Scripted):
        def freeze(self) -> None:
            let_run(cgroup)
            super().freeze()
            self.marked = unreadable  # type: ignore[method-assign]

    def unreadable() -> Mark | None:
        del cgroup.marked
        raise OSError(errno.EIO, "input/output error")

    cgroup: Any = Unreadable()
    cycle = FreezeCycle(cgroup, frozen_ns=10, thawed_ns=10)
    with pytest.raises(OSError, match="input/output"):
        cycle.start(0)
    assert cgroup.asked
    assert not cycle.step(21, allowed=True, steady=True)
    assert not cgroup.asked


def test_what_another_writer_freezes_after_it_was_undone_is_theirs() -> None:
    cgroup: Any = Scripted()
    cycle = started(cgroup)
    let_run(cgroup)
    cgroup.freeze()
    assert not cycle.step(5, allowed=True, steady=True)
    assert cgroup.asked


KEY, OTHER = ContainerKey("docker:abc"), ContainerKey("docker:def")
PLACE = FreezerCgroup(2, 1, "/not/there")


@pytest.fixture
def freeze() -> Freeze:
    return Freeze(Procfs(), lambda _: ())


def test_a_container_is_not_frozen_when_no_thread_can_be_started_to_thaw_it(
    freeze: Freeze, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    subject = Subject(Container(KEY, "training", "docker"), (), frozenset(), rule=None)  # type: ignore[arg-type]
    freeze.allow({KEY: True})
    freeze._places[KEY] = PLACE
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(NotFreezableError, match="can't start new thread"):
        freeze.apply(subject)  # it would raise GoneError if it went on to the cgroup
    freeze.close()


def test_a_step_that_fails_unexpectedly_leaves_no_container_frozen(freeze: Freeze) -> None:
    class Broken(Scripted):
        def marked(self) -> Mark | None:
            raise RuntimeError("broken")

        def close(self) -> None:
            self.closed = True

    class Closable(Scripted):
        def close(self) -> None:
            self.closed = True

    broken: Any = Broken()
    healthy: Any = Closable()
    freeze._cycles[KEY] = _ActiveCycle(PLACE, FreezeCycle(broken, frozen_ns=10, thawed_ns=10))
    freeze._cycles[OTHER] = _ActiveCycle(PLACE, started(healthy))
    freeze.allow({KEY: True, OTHER: True})
    with pytest.raises(RuntimeError, match="broken"):
        freeze._step_all()
    assert (healthy.asked, healthy.closed, broken.closed) == (False, True, True)
    assert not freeze._cycles
    freeze.close()
