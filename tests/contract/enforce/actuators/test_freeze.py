# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`freeze`, on real cgroups of both versions: what is frozen uses no CPU, and only what we froze is thawed."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from agent.node.procfs import Procfs
from enforce.actuators.executor import RungExecutor
from enforce.actuators.freezer.cgroup import Cgroup, FreezerCgroup, Mark, NotFreezableError
from enforce.actuators.freezer.rung import ForeignWriterError, Freeze, FreezeCycle
from enforce.actuators.undo import BackgroundUndo, acts_where, release_all, undo_all
from enforce.ledger.entries import LedgerEntry, UndoOutcome
from enforce.ledger.ledger import Ledger, read
from enforce.model import Subject
from enforce.policy.model import Limits
from tests.support.groups import Group, group, process_of, roots, spins, ticks
from tools.harness import cgroups
from tools.harness.wait import until


@pytest.fixture(params=[2, 1], ids=["v2", "v1"])
def box(request: pytest.FixtureRequest) -> Iterator[Group]:
    with group(request.param) as made:
        yield made


@pytest.fixture
def freeze() -> Iterator[Freeze]:
    freeze = Freeze(Procfs(), lambda _: ())
    yield freeze
    freeze.close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def state_of(box: Group) -> Cgroup:
    return Cgroup(FreezerCgroup.of(box.version, str(box.folder)))


def is_frozen(box: Group) -> bool:
    with state_of(box) as cgroup:
        return cgroup.is_frozen()


def by_hand(box: Group, frozen: bool) -> None:
    """As another program does it."""
    if box.version == 2:
        (box.folder / "cgroup.freeze").write_text("1" if frozen else "0")
    else:
        (box.folder / "freezer.state").write_text("FROZEN" if frozen else "THAWED")
    until(lambda: is_frozen(box) == frozen, "the other program's act")


def act(freeze: Freeze, subject: Subject, path: Path) -> LedgerEntry:
    """As `enforce.actuators.executor` does it: the entry, then the act."""
    assert freeze.obstacle(subject) is None
    (entry,) = freeze.intents(subject)
    Ledger(path).intend(entry)
    until(lambda: is_applied(freeze, subject), "to be frozen")
    return entry


def is_applied(freeze: Freeze, subject: Subject, steady: bool = True) -> bool:
    """As `enforce.actuators.executor` does now and then; False when the machine was too slow for it."""
    freeze.allow({subject.container.key: steady})
    freeze.intents(subject)
    with suppress(NotFreezableError):
        freeze.apply(subject)
        return True
    return False


def stands_still(box: Group, freeze: Freeze, tgid: int) -> bool:
    """Whether it is frozen and uses no CPU; the permission is renewed, a busy machine may have let it run out."""
    freeze.allow({box.key: True})
    before = ticks(tgid)
    time.sleep(0.1)
    return is_frozen(box) and ticks(tgid) == before


def outcomes(path: Path) -> list[UndoOutcome]:
    return [one.outcome for one in release_all(path)]


def test_what_is_frozen_uses_no_cpu_and_what_is_released_does(box: Group, freeze: Freeze, path: Path) -> None:
    tgid = box.spinner()
    until(lambda: ticks(tgid) > 0, "the spinner to spin")
    act(freeze, box.subject(tgid), path)
    until(lambda: stands_still(box, freeze, tgid), "it to stand still")
    freeze.allow({})
    assert outcomes(path) in ([UndoOutcome.RESUMED], [UndoOutcome.RUNNING])
    until(lambda: spins(tgid), "the spinner to spin again")
    assert read(path) == []
    with state_of(box) as cgroup:
        assert cgroup.marked() is None


def test_whatever_lies_below_it_is_frozen_too_and_what_joins_it(box: Group, freeze: Freeze, path: Path) -> None:
    parent, inner = box.spinner(), box.spinner("payload/deep")
    act(freeze, box.subject(parent), path)
    until(lambda: stands_still(box, freeze, inner), "what lies below to stand still")
    late = box.spinner()
    until(lambda: stands_still(box, freeze, late), "what joined it to stand still")


def test_the_ledger_alone_thaws_it_after_agent_and_guardian_are_gone(box: Group, path: Path) -> None:
    tgid = box.spinner()
    actor = os.fork()
    if actor == 0:
        try:
            act(Freeze(Procfs(), lambda _: ()), box.subject(tgid), path)
            os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(actor, 0)[1])
    assert is_frozen(box)
    assert outcomes(path) == [UndoOutcome.RESUMED]
    until(lambda: spins(tgid), "the spinner to spin again")
    assert outcomes(path) == []


def test_it_takes_turns_so_that_the_floor_is_kept(box: Group, freeze: Freeze, path: Path) -> None:
    tgid = box.spinner()
    limits = Limits(None, 0.5, 100_000_000, None)
    act(freeze, box.subject(tgid, limits=limits), path)
    seen = set()

    def both() -> bool:
        freeze.allow({box.key: False})
        seen.add(is_frozen(box))
        return len(seen) == 2

    until(both, "both turns")
    before = ticks(tgid)

    def worked() -> bool:
        freeze.allow({box.key: False})
        return ticks(tgid) > before + 5

    until(worked, "work in the thawed turns")


def test_it_is_thawed_when_the_deciding_thread_is_silent(box: Group, freeze: Freeze, path: Path) -> None:
    tgid = box.spinner()
    act(freeze, box.subject(tgid), path)
    until(lambda: not is_frozen(box), "the lease to run out")
    assert [entry.act for entry in read(path)] == ["freeze"]
    until(lambda: is_applied(freeze, box.subject(tgid)) and is_frozen(box), "to be frozen again")


def test_a_guardian_that_undoes_it_ends_the_cycle_and_is_not_taken_for_another_writer(
    box: Group, freeze: Freeze, path: Path
) -> None:
    tgid = box.spinner()
    subject = box.subject(tgid, limits=Limits(None, 0.05, 30_000_000, None))
    act(freeze, subject, path)
    for _ in range(20):
        assert next(one.outcome for one in undo_all(path)) in (UndoOutcome.RESUMED, UndoOutcome.RUNNING)
        until(lambda: not is_frozen(box), "the undoing")
        until(lambda: is_applied(freeze, subject, steady=False) and is_frozen(box), "to be frozen again")
    assert freeze.foreign_writes == 0


def test_what_another_writer_has_frozen_is_never_ours_and_never_thawed(box: Group, freeze: Freeze, path: Path) -> None:
    tgid = box.spinner()
    subject = box.subject(tgid)
    freeze.allow({box.key: True})
    by_hand(box, frozen=True)
    assert freeze.obstacle(subject) == "another writer has frozen it: left alone"
    (entry,) = freeze.intents(subject)  # it was frozen after we looked
    Ledger(path).intend(entry)
    freeze.allow({box.key: True})
    with pytest.raises(ForeignWriterError):
        freeze.apply(subject)
    assert outcomes(path) == [UndoOutcome.RUNNING]
    assert is_frozen(box)
    assert freeze.foreign_writes == 1


def test_what_another_writer_thaws_is_reported_and_not_frozen_again(box: Group, freeze: Freeze, path: Path) -> None:
    tgid = box.spinner()
    subject = box.subject(tgid)
    act(freeze, subject, path)

    def reported() -> bool:
        freeze.allow({box.key: True})
        by_hand(box, frozen=False)  # again, should it have been thawed by turns just then
        return freeze.foreign_writes == 1

    until(reported, "the foreign writer to be noticed")
    with pytest.raises(ForeignWriterError, match="another writer has thawed it"):
        freeze.apply(subject)
    assert "thawed" in (freeze.obstacle(subject) or "")
    assert outcomes(path) == [UndoOutcome.RUNNING]
    assert not is_frozen(box)


def test_a_cgroup_that_was_recreated_under_the_same_name_is_not_thawed(box: Group, freeze: Freeze, path: Path) -> None:
    act(freeze, box.subject(box.spinner()), path)
    freeze.close()
    box.end()
    box.folder.mkdir()
    box.started.clear()
    box.spinner()
    by_hand(box, frozen=True)
    assert outcomes(path) == [UndoOutcome.GONE]
    assert is_frozen(box)


def test_a_cgroup_that_is_gone_is_done(box: Group, freeze: Freeze, path: Path) -> None:
    act(freeze, box.subject(box.spinner()), path)
    box.end()
    assert outcomes(path) == [UndoOutcome.GONE]
    assert read(path) == []
    box.folder.mkdir()


def test_frozen_and_stopped_both_are_undone(box: Group, freeze: Freeze, path: Path) -> None:
    tgid = box.spinner()
    Ledger(path).intend(LedgerEntry.of("pace", process_of(tgid), box.key, time.time_ns()))
    os.kill(tgid, signal.SIGSTOP)
    act(freeze, box.subject(tgid), path)
    freeze.close()
    assert release_all(path)
    until(lambda: spins(tgid), "the spinner to spin again")
    assert read(path) == []


def test_its_own_cgroup_is_asked_for(box: Group, freeze: Freeze) -> None:
    mine, other = box.spinner(), box.spinner()
    assert freeze.obstacle(box.subject(mine)) is None
    spared = Freeze(Procfs(), lambda _: {other})
    assert "also holds processes that are not of" in (spared.obstacle(box.subject(mine)) or "")
    assert freeze.obstacle(box.subject(mine, os.getpid())) == f"no freezer has all of its processes in {box.path}"


def test_a_container_without_a_cgroup_of_its_own_is_left_alone(box: Group, freeze: Freeze) -> None:
    tgid = box.spinner()
    subject = box.subject(tgid)
    host = replace(subject, container=replace(subject.container, cgroup="/"))
    assert freeze.obstacle(host) == "it has no cgroup of its own"
    os.kill(tgid, signal.SIGKILL)
    os.waitpid(tgid, 0)
    assert freeze.obstacle(subject) == "none of its processes runs"


def test_containers_that_it_runs_itself_are_frozen_with_it(box: Group, freeze: Freeze, path: Path) -> None:
    tgid = box.spinner()
    inner = box.spinner("docker-" + "ab" * 32 + ".scope")
    act(freeze, box.subject(tgid), path)
    until(lambda: stands_still(box, freeze, inner), "the inner container to stand still")


def test_a_plain_cgroup_with_a_container_below_is_left_alone(box: Group, freeze: Freeze) -> None:
    plain = f"/plain-{box.id[:8]}"
    inner = f"{plain}/docker-{'ab' * 32}.scope"
    tgid, other = box.spinner(), box.spinner()
    subject = box.subject(tgid)
    subject = replace(subject, container=replace(subject.container, id="", runtime="runc", cgroup=plain))
    root = roots()[box.version]
    (root / inner.lstrip("/")).mkdir(parents=True)
    try:
        (root / plain.lstrip("/") / "cgroup.procs").write_text(str(tgid))
        (root / inner.lstrip("/") / "cgroup.procs").write_text(str(other))
        assert "also holds abababababab" in (freeze.obstacle(subject) or "")
        with pytest.raises(NotFreezableError):
            freeze.intents(subject)
    finally:
        cgroups.empty(plain)
        cgroups.remove(plain, ())


@pytest.mark.parametrize("comm", ["nvidia-cuda-mps", "nvidia-persiste"])
def test_a_program_of_the_node_that_others_depend_on_is_left_alone(box: Group, freeze: Freeze, comm: str) -> None:
    tgid = box.spinner()
    box.spinner(comm=comm)
    assert f"{comm}, which others depend on" in (freeze.obstacle(box.subject(tgid)) or "")


@pytest.mark.parametrize("comm", ["runc", "containerd", "dockerd", "kubelet"])
def test_what_a_process_is_called_does_not_protect_it(box: Group, freeze: Freeze, path: Path, comm: str) -> None:
    tgid = box.spinner(comm=comm)
    act(freeze, box.subject(tgid), path)
    until(lambda: stands_still(box, freeze, tgid), "it to stand still")


def test_a_runtimes_own_program_on_the_node_is_left_alone(box: Group, freeze: Freeze, tmp_path: Path) -> None:
    program = tmp_path / "dockerd"
    shutil.copy("/bin/sleep", program)
    tgid = box.spinner()
    with subprocess.Popen([program, "1000"]) as daemon:
        try:
            (box.folder / "cgroup.procs").write_text(str(daemon.pid))
            until(lambda: Procfs().stat(daemon.pid).comm == "dockerd", "its name")
            assert freeze.obstacle(box.subject(tgid)) == "its cgroup holds dockerd, which others depend on"
        finally:
            daemon.kill()


def test_a_container_cannot_escape_by_making_cgroups_and_they_cost_the_deciding_thread_little(
    box: Group, freeze: Freeze, path: Path
) -> None:
    tgid = box.spinner()
    for number in range(1500):
        (box.folder / f"w{number}").mkdir()
    deep = box.spinner("w7")
    subject = box.subject(tgid, deep)
    freeze.obstacle(subject)
    took = []
    passing = itertools.count(1)

    def is_answered() -> bool:
        began = time.thread_time()
        obstacle = freeze.obstacle(box.subject(tgid, deep, *([tgid] * next(passing))))  # its processes always change
        took.append(time.thread_time() - began)
        return obstacle is None

    until(is_answered, "the answer")
    assert min(took) < 0.01
    act(freeze, subject, path)
    until(lambda: stands_still(box, freeze, deep), "all of it to stand still")


def test_through_the_rungs_it_is_frozen_and_thawed(box: Group, freeze: Freeze, path: Path) -> None:
    tgid = box.spinner()
    subject = box.subject(tgid)
    rungs = RungExecutor({"freeze": freeze}, Ledger(path))

    def wanting(rung: str | None, then: Callable[[], bool]) -> Callable[[], bool]:
        def again() -> bool:
            freeze.allow({box.key: True} if rung else {})
            rungs.want({box.key: (subject, frozenset({rung} if rung else ()))})
            return then()

        return again

    until(
        wanting("freeze", lambda: rungs.in_force(box.key) == {"freeze"} and is_frozen(box)), "the rung to be in force"
    )
    until(wanting(None, lambda: not rungs.in_force(box.key)), "the rung to be undone")
    assert not is_frozen(box)
    assert read(path) == []
    until(wanting("freeze", lambda: rungs.in_force(box.key) == {"freeze"}), "the rung to be in force")
    freeze.allow({})
    rungs.release_all()
    assert not is_frozen(box)
    assert read(path) == []


def test_a_mark_alone_shows_that_it_is_ours_to_thaw(box: Group, path: Path) -> None:
    """A crash between the mark and the freezer, and one in the middle of the undoing."""
    tgid = box.spinner()
    place = FreezerCgroup.of(box.version, str(box.folder))
    for mark in Mark:
        Ledger(path).intend(LedgerEntry.at("freeze", str(place), box.key, 1))
        with Cgroup(place) as cgroup:
            cgroup.mark(mark)
        assert outcomes(path) == [UndoOutcome.RUNNING]
        Ledger(path).intend(LedgerEntry.at("freeze", str(place), box.key, 2))
        with Cgroup(place) as cgroup:
            cgroup.mark(mark)
            cgroup.freeze()
        assert outcomes(path) == [UndoOutcome.RESUMED]
    until(lambda: spins(tgid), "the spinner to spin again")


def test_beside_an_agent_that_hangs_it_is_undone_and_its_entry_stays(box: Group, freeze: Freeze, path: Path) -> None:
    act(freeze, box.subject(box.spinner()), path)
    background_undo = BackgroundUndo(path, time.monotonic_ns, acts_where(quick=True))
    background_undo.start_if_due()
    background_undo.wait()
    until(lambda: not is_frozen(box), "the undoing")
    assert [entry.act for entry in read(path)] == ["freeze"]


def test_undone_just_before_it_is_frozen_it_runs_on(box: Group, path: Path) -> None:
    tgid = box.spinner()
    place = FreezerCgroup.of(box.version, str(box.folder))
    Ledger(path).intend(LedgerEntry.at("freeze", str(place), box.key, 1))

    class Raced(Cgroup):
        undoing = True

        def freeze(self) -> None:
            if self.undoing:
                assert [one.outcome for one in undo_all(path)] == [UndoOutcome.RUNNING]
            super().freeze()

    with Raced(place) as cgroup:
        cycle = FreezeCycle(cgroup, frozen_ns=10, thawed_ns=10)
        with pytest.raises(NotFreezableError):
            cycle.start(0)
        assert not cgroup.is_asked()
        cgroup.undoing = False
        cycle.start(0)
        assert cycle.step(10, allowed=True, steady=False)
        cgroup.undoing = True
        assert not cycle.step(20, allowed=True, steady=False)
        assert not cgroup.is_asked()
        assert cgroup.marked() is None
        cgroup.mark(Mark.UNDOING)
        assert not cgroup.claim()
        assert cgroup.marked() is Mark.UNDOING
    until(lambda: spins(tgid), "the spinner to spin")
