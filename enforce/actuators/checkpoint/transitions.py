# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From one checkpoint state of a process to another, over the driver's calls.

Another program's lock is never taken for ours: `lock` and `swap_out` begin at RUNNING unless the caller knows that the
lock is its own. `release` ends at RUNNING from any state, also while an act whose caller has died still goes on inside
the driver: where the state changed meanwhile it is read again. A process has to run to take part, so that is found out
here too. Undoing waits for helper programs, which import this: it imports little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from agent.node.procfs import Procfs
from enforce.actuators.checkpoint import driver as codes
from enforce.actuators.checkpoint.driver import AnswerKind, CallError, CheckpointState, Driver, HelperAnswer

_MAX_STEPS = 16  # of one release: two are the rule; more only while others act too
_LOOK_AGAIN_SECONDS = 0.02
_RUNS_AGAIN_SECONDS = 0.005
_STOPPED_OR_TRACED = "Tt"
_KINDS = {  # that a process has ended is never taken from an error: the driver says 304 of one that it cannot restore
    codes.NOT_INITIALIZED: AnswerKind.NO_CUDA,
    codes.NOT_READY: AnswerKind.BUSY,
    codes.NOT_SUPPORTED: AnswerKind.UNSUPPORTED,
    codes.OUT_OF_MEMORY: AnswerKind.NO_ROOM,
    codes.ILLEGAL_STATE: AnswerKind.FOREIGN,
}


def state(driver: Driver, tgid: int) -> HelperAnswer:
    """The state of the process now."""
    return _guarded(lambda: _unchanged(driver, tgid))


def lock(driver: Driver, tgid: int, limit_ms: int, ours: bool = False) -> HelperAnswer:
    """RUNNING → LOCKED. `ours`: an earlier lock is ours, and will do."""
    return _guarded(lambda: _lock(driver, tgid, limit_ms, ours))


def swap_out(driver: Driver, tgid: int, limit_ms: int, ours: bool = False) -> HelperAnswer:
    """RUNNING → CHECKPOINTED. If it can be locked but not saved, it is unlocked again."""

    def act() -> HelperAnswer:
        locked = _lock(driver, tgid, limit_ms, ours)
        if locked.kind is not AnswerKind.DONE or locked.after is CheckpointState.CHECKPOINTED:
            return locked
        try:
            driver.checkpoint(tgid)
        except CallError:
            if locked.before is CheckpointState.RUNNING:
                with suppress(CallError):  # then it is FAILED, which undoing from the ledger reports
                    driver.unlock(tgid)
            raise
        return HelperAnswer(AnswerKind.DONE, locked.before, CheckpointState.CHECKPOINTED)

    return _guarded(act)


def swap_in(driver: Driver, tgid: int) -> HelperAnswer:
    """CHECKPOINTED → LOCKED."""
    return _guarded(lambda: _step(driver, tgid, CheckpointState.CHECKPOINTED, driver.restore, CheckpointState.LOCKED))


def unlock(driver: Driver, tgid: int) -> HelperAnswer:
    """LOCKED → RUNNING."""
    return _guarded(lambda: _step(driver, tgid, CheckpointState.LOCKED, driver.unlock, CheckpointState.RUNNING))


def release(
    driver: Driver,
    tgid: int,
    settle_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> HelperAnswer:
    """Any state → RUNNING. For `settle_seconds` a lock whose caller has died may still take effect."""
    return _guarded(lambda: _release(driver, tgid, clock() + settle_seconds, clock, sleep))


def _release(
    driver: Driver, tgid: int, settled_at: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> HelperAnswer:
    first = found = driver.state(tgid)
    for _ in range(_MAX_STEPS):
        while found is CheckpointState.RUNNING and first is CheckpointState.RUNNING and clock() < settled_at:
            sleep(_LOOK_AGAIN_SECONDS)
            found = driver.state(tgid)
        if found is CheckpointState.RUNNING:
            return HelperAnswer(AnswerKind.DONE, first, CheckpointState.RUNNING)
        first = found if first is CheckpointState.RUNNING else first
        if found is CheckpointState.FAILED:
            return HelperAnswer(
                AnswerKind.FAILED, first, found, "its checkpoint failed inside the driver: only ending it is left"
            )
        try:
            if found is CheckpointState.CHECKPOINTED:
                driver.restore(tgid)
            else:
                driver.unlock(tgid)
        except CallError as error:
            if error.code != codes.ILLEGAL_STATE:  # else an act that was under way has just ended
                raise
        found = driver.state(tgid)
    return HelperAnswer(AnswerKind.BUSY, first, found, "another program keeps locking it")


def _unchanged(driver: Driver, tgid: int) -> HelperAnswer:
    found = driver.state(tgid)
    return HelperAnswer(AnswerKind.DONE, found, found)


def _lock(driver: Driver, tgid: int, limit_ms: int, ours: bool) -> HelperAnswer:
    before = driver.state(tgid)
    if before is CheckpointState.RUNNING:
        driver.lock(tgid, limit_ms)
        return HelperAnswer(AnswerKind.DONE, before, CheckpointState.LOCKED)
    if ours and before is not CheckpointState.FAILED:
        return HelperAnswer(AnswerKind.DONE, before, before)
    return HelperAnswer(
        AnswerKind.FOREIGN, before, before, f"it is {before.name} already, by another program: left alone"
    )


def _step(
    driver: Driver, tgid: int, wanted: CheckpointState, call: Callable[[int], None], after: CheckpointState
) -> HelperAnswer:
    before = driver.state(tgid)
    if before is not wanted:
        return HelperAnswer(AnswerKind.FOREIGN, before, before, f"it is {before.name}, not {wanted.name}")
    call(tgid)
    return HelperAnswer(AnswerKind.DONE, before, after)


def _guarded(act: Callable[[], HelperAnswer]) -> HelperAnswer:
    try:
        return act()
    except CallError as error:
        return HelperAnswer(_KINDS.get(error.code, AnswerKind.FAILED), error=str(error))


def reason_not_running(tgid: int, procfs: Procfs, cgroups: Path = Path("/sys/fs/cgroup")) -> str | None:
    """Why it does not run, for a message; None: it runs."""
    if procfs.stat(tgid).state in _STOPPED_OR_TRACED:
        return "it is stopped"
    frozen = any(_is_frozen(path) for path in _freezers(procfs.cgroup(tgid), cgroups))
    return "its cgroup is frozen" if frozen else None


def wait_until_running(tgid: int, procfs: Procfs, limit_seconds: float) -> str | None:
    """None as soon as it runs; after the limit the reason why not. Pacing stops a process for moments only."""
    ends = time.monotonic() + limit_seconds
    while (reason := reason_not_running(tgid, procfs)) is not None and time.monotonic() < ends:
        time.sleep(_RUNS_AGAIN_SECONDS)
    return reason


def _freezers(text: str, cgroups: Path) -> Iterator[Path]:
    """The freezer's state files: of cgroup v2, wherever it is mounted, and of v1."""
    for line in text.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        below = path.lstrip("/")
        if "freezer" in controllers.split(","):
            yield cgroups / "freezer" / below / "freezer.state"
        elif number == "0" and not controllers:
            yield cgroups / below / "cgroup.events"
            yield cgroups / "unified" / below / "cgroup.events"


def _is_frozen(path: Path) -> bool:
    with suppress(OSError):
        text = path.read_text(encoding="ascii", errors="replace")
        return "frozen 1" in text or text.startswith(("FROZEN", "FREEZING"))
    return False
