# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""From one state of a process to another, over the driver's calls.

Nobody else's lock is taken for ours: `lock` and `swap_out` begin at RUNNING unless the caller knows that the lock is
its own. `release` ends at RUNNING from whatever it finds, also while an act whose caller has died still goes on inside
the driver: a state that changed under its hands is looked at again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from enforce.checkpoint import driver as codes
from enforce.checkpoint.answer import Answer, Kind
from enforce.checkpoint.driver import CallError, Driver, State

_MOST_STEPS = 16  # of one release: two are the rule; more only while others act too
_LOOK_AGAIN_SECONDS = 0.02
_KINDS = {
    codes.INVALID_VALUE: Kind.GONE,
    codes.NOT_INITIALIZED: Kind.NO_CUDA,
    codes.NOT_READY: Kind.BUSY,
    codes.NOT_SUPPORTED: Kind.UNSUPPORTED,
    codes.OUT_OF_MEMORY: Kind.NO_ROOM,
    codes.ILLEGAL_STATE: Kind.FOREIGN,
}


def state(driver: Driver, tgid: int) -> Answer:
    """What it is in now."""
    return _guarded(lambda: _unchanged(driver, tgid))


def lock(driver: Driver, tgid: int, limit_ms: int, ours: bool = False) -> Answer:
    """RUNNING → LOCKED. `ours`: an earlier lock is ours, and will do."""
    return _guarded(lambda: _lock(driver, tgid, limit_ms, ours))


def swap_out(driver: Driver, tgid: int, limit_ms: int, ours: bool = False) -> Answer:
    """RUNNING → CHECKPOINTED. If it can be locked but not saved, it is unlocked again."""

    def act() -> Answer:
        locked = _lock(driver, tgid, limit_ms, ours)
        if locked.kind is not Kind.DONE or locked.after is State.CHECKPOINTED:
            return locked
        try:
            driver.checkpoint(tgid)
        except CallError:
            if locked.before is State.RUNNING:
                with suppress(CallError):  # then it is FAILED; whoever reads the ledger says so
                    driver.unlock(tgid)
            raise
        return Answer(Kind.DONE, locked.before, State.CHECKPOINTED)

    return _guarded(act)


def swap_in(driver: Driver, tgid: int) -> Answer:
    """CHECKPOINTED → LOCKED."""
    return _guarded(lambda: _step(driver, tgid, State.CHECKPOINTED, driver.restore, State.LOCKED))


def unlock(driver: Driver, tgid: int) -> Answer:
    """LOCKED → RUNNING."""
    return _guarded(lambda: _step(driver, tgid, State.LOCKED, driver.unlock, State.RUNNING))


def release(
    driver: Driver,
    tgid: int,
    settle_seconds: float = 0.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Answer:
    """Whatever state → RUNNING. For `settle_seconds` a lock that nobody waits for any more may still come to be."""
    return _guarded(lambda: _release(driver, tgid, clock() + settle_seconds, clock, sleep))


def _release(
    driver: Driver, tgid: int, settled_at: float, clock: Callable[[], float], sleep: Callable[[float], None]
) -> Answer:
    first = found = driver.state(tgid)
    for _ in range(_MOST_STEPS):
        while found is State.RUNNING and first is State.RUNNING and clock() < settled_at:
            sleep(_LOOK_AGAIN_SECONDS)
            found = driver.state(tgid)
        if found is State.RUNNING:
            return Answer(Kind.DONE, first, State.RUNNING)
        first = found if first is State.RUNNING else first
        if found is State.FAILED:
            return Answer(Kind.FAILED, first, found, "its checkpoint failed inside the driver: only ending it is left")
        try:
            if found is State.CHECKPOINTED:
                driver.restore(tgid)
            else:
                driver.unlock(tgid)
        except CallError as error:
            if error.code != codes.ILLEGAL_STATE:  # else an act that was under way has just ended
                raise
        found = driver.state(tgid)
    return Answer(Kind.BUSY, first, found, "somebody else keeps locking it")


def _unchanged(driver: Driver, tgid: int) -> Answer:
    found = driver.state(tgid)
    return Answer(Kind.DONE, found, found)


def _lock(driver: Driver, tgid: int, limit_ms: int, ours: bool) -> Answer:
    before = driver.state(tgid)
    if before is State.RUNNING:
        driver.lock(tgid, limit_ms)
        return Answer(Kind.DONE, before, State.LOCKED)
    if ours and before is not State.FAILED:
        return Answer(Kind.DONE, before, before)
    return Answer(Kind.FOREIGN, before, before, f"it is {before.name} already, by somebody else: left alone")


def _step(driver: Driver, tgid: int, wanted: State, call: Callable[[int], None], after: State) -> Answer:
    before = driver.state(tgid)
    if before is not wanted:
        return Answer(Kind.FOREIGN, before, before, f"it is {before.name}, not {wanted.name}")
    call(tgid)
    return Answer(Kind.DONE, before, after)


def _guarded(act: Callable[[], Answer]) -> Answer:
    try:
        return act()
    except CallError as error:
        return Answer(_KINDS.get(error.code, Kind.FAILED), error=str(error))
