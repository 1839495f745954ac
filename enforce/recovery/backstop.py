# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What undoes the acts of agent and guardian when neither of them can: the backstop and the standby.

The backstop is a third process beside them, for when both stand still or are killed. It does nothing but look at two
words of memory ten times a second, has no descriptor of a probe or map, and so hangs on nothing that they hang on. Who
lives is known by their beats; that both are dead, by a pipe of which only they have the writing end. The kernel stops
no process while the guardian stands still or is dead (its lease is over after 200 ms), so what is resumed here stays
so. Invariant: while one of the two lives no entry of the ledger is closed here, as they may go on; once both are gone
the run directory's lock says whether a new agent has taken over.

`Beats` is the page of memory on which the three show each other that they run. It is a memfd: it needs no file system
and no BPF, and lives as long as one of them. Each writes its own word, whole at once, so there is no lock to be killed
under. Times are CLOCK_MONOTONIC, which stands still while the machine sleeps.

In a pod guardian and backstop share the agent's fate: when a container ends or runs out of memory, all of its processes
are killed. The standby (`gpuwarden release --stand-by`) is in a container of its own and lives on. Invariant: it undoes
nothing while an agent or a guardian holds the run directory, so it never fights an agent; one that starts meanwhile
waits for it.
"""

from __future__ import annotations

import ctypes as c
import json
import logging
import mmap
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from agent.core import logs
from agent.core.clock import monotonic_ns
from agent.node.procfs import Procfs
from enforce.actuators.undo import AGAIN_NS, BackgroundUndo, MadeBy, UndoResult, acts_where, release_all, undo_all
from enforce.ledger import ledger
from enforce.ledger.entries import UndoOutcome
from enforce.ledger.run_lock import enforcing_elsewhere, hold_if_unused

_log = logging.getLogger("gpuwarden.backstop")
LOOK_NS: Final = 100_000_000
STILL_NS: Final = 500_000_000  # ten rounds of the guardian, five decisions of the agent
_STOOD_STILL_NS = 3 * LOOK_NS  # without a look: the others have stood still as well, with all of the machine
_LATE_ACTS_SECONDS = 0.02  # a launch that passed the lease check just before it ended may still stop
_PATIENCE_SECONDS = 10.0  # for the lock, and for what cannot be undone at once
_AGAIN_SECONDS = 0.005
STAND_BY_SECONDS: Final = 0.02  # everything is to run again within 100 ms; ending the container takes half of them
ENDING_SECONDS: Final = 75.0  # for an agent that is stopped at the same time
_RETRY_SECONDS = 1.0  # what could not be undone: a device without room, a disk that is full
_STOPS: Final = acts_where(MadeBy.KERNEL)
_QUICK: Final = acts_where(quick=True)
_SLOW: Final = acts_where(quick=False)
Stamp = tuple[int, int, int]


class Beats(c.Structure):
    """When each of them last ran; 0: not yet."""

    _fields_ = [
        ("agent_ns", c.c_uint64),
        ("guardian_ns", c.c_uint64),
        ("backstop_ns", c.c_uint64),
        ("releases", c.c_uint64),  # twice as often as the backstop resumed what the guardian holds; odd: it is at it
    ]
    agent_ns: int
    guardian_ns: int
    backstop_ns: int
    releases: int

    @classmethod
    def shared(cls, fd: int) -> Beats:
        """The page behind the descriptor, live."""
        return cls.from_buffer(mmap.mmap(fd, mmap.PAGESIZE))


def new_page() -> int:
    """The descriptor of a page of zeros. OSError."""
    fd = os.memfd_create("gpuwarden-beats")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


class Remaining(Enum):
    """What neither agent nor guardian undoes now."""

    NOTHING = "nothing"
    STOPS = "stops"  # the agent lives, and does what is its own
    EVERYTHING = "everything"


def remaining(agent_ns: int, guardian_ns: int, now_ns: int) -> Remaining:
    """What is left to the backstop, by the others' last beats: the guardian undoes everything while it runs."""
    if now_ns - guardian_ns <= STILL_NS:
        return Remaining.NOTHING
    return Remaining.STOPS if now_ns - agent_ns <= STILL_NS else Remaining.EVERYTHING


@dataclass(frozen=True, slots=True)
class BackstopSettings:
    """What the agent hands over on the command line. `beats`: the descriptor of the page."""

    beats: int
    ledger: str
    agent_tgid: int
    log_format: str = logs.Format.TEXT

    def to_argument(self) -> str:
        """As one word of the command line."""
        return json.dumps(asdict(self))


class Backstop:
    """`look` is to be called every LOOK_NS, and `finish` once agent and guardian are gone."""

    def __init__(self, beats: Beats, path: Path, agent_tgid: int, clock: Callable[[], int] = monotonic_ns) -> None:
        self._beats, self._path, self._agent_tgid, self._clock = beats, path, agent_tgid, clock
        self._slow = BackgroundUndo(path, clock, _SLOW)
        self._looked_ns = clock()
        self._again_ns = 0
        beats.releases += beats.releases & 1  # one before it ended at it

    def look(self) -> Remaining:
        """Undoes what agent and guardian do not undo now. Returns what that was."""
        now = self._clock()
        late, self._looked_ns = now - self._looked_ns > _STOOD_STILL_NS, now
        self._beats.backstop_ns = now
        if late:
            return Remaining.NOTHING
        found = remaining(self._beats.agent_ns, self._beats.guardian_ns, now)
        if found is Remaining.NOTHING:
            self._again_ns = 0
        elif now >= self._again_ns:
            self._undo(found)
            self._again_ns = self._clock() + AGAIN_NS
        return found

    def finish(self) -> bool:
        """Both are gone. Whether nothing is left, or another agent looks after it."""
        if self._is_taken_over():  # this process slept
            return True
        ends = time.monotonic() + _LATE_ACTS_SECONDS
        _report("agent and guardian are gone", undo_all(self._path, acts=_QUICK))
        while time.monotonic() < ends:
            time.sleep(_AGAIN_SECONDS)
            undo_all(self._path, acts=_QUICK)
        stand_by, ends = StandBy(self._path.parent), time.monotonic() + _PATIENCE_SECONDS
        while ledger.read(self._path) and not stand_by.look() and not self._is_taken_over():
            if time.monotonic() >= ends:
                return False
            time.sleep(_AGAIN_SECONDS)
        return True

    def _is_taken_over(self) -> bool:
        return enforcing_elsewhere(self._path.parent, Procfs()) not in (None, self._agent_tgid)

    def _undo(self, found: Remaining) -> None:
        """Their entries stay. A guardian that goes on meanwhile sees `releases` and resumes what it holds too."""
        self._beats.releases |= 1
        if found is Remaining.STOPS:
            _report("the guardian stands still", undo_all(self._path, acts=_STOPS))
        else:
            _report("agent and guardian stand still", undo_all(self._path, acts=_QUICK))
            self._slow.start_if_due()
        self._beats.releases += 1


def _report(why: str, undone: list[UndoResult]) -> None:
    resumed = sum(one.outcome is UndoOutcome.RESUMED for one in undone)
    if resumed:
        _log.error("%s: undid %d of their acts", why, resumed)


class StandBy:
    """`look` is to be called every STAND_BY_SECONDS."""

    def __init__(self, run_dir: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_dir, self._ledger, self._clock = run_dir, run_dir / "ledger.jsonl", clock
        self._done: Stamp | None = None  # of a ledger with nothing to undo
        self._again = 0.0  # not before then

    def look(self) -> bool:
        """Undoes what is left if no agent enforces. True when none does and nothing is left."""
        with hold_if_unused(self._run_dir) as unused:
            if not unused:
                self._again = 0.0
                return False
            return self._stamp() == self._done or (self._clock() >= self._again and self._release())

    def finish(self, received: Callable[[float], int | None] | None) -> bool:
        """On SIGTERM: waits for an agent that is ending too, and looks once more. Whether nothing is left.

        `received` waits so many seconds for a signal, which ends the waiting; None: do not wait.
        """
        until = self._clock() + ENDING_SECONDS
        while not (over := self.look()):
            if received is None or self._clock() >= until or received(STAND_BY_SECONDS) is not None:
                break
        return over

    def _release(self) -> bool:
        if (why := ledger.unreadable(self._ledger)) is not None:
            _log.error("nothing can be undone: %s %s", self._ledger, why)
            self._again = self._clock() + _RETRY_SECONDS
            return False
        released = release_all(self._ledger)
        left = [one for one in released if not one.closed]
        if len(released) > len(left):
            _log.warning("the agent and its guardian are gone: released %d of their acts", len(released) - len(left))
        for one in left:
            what = "cannot be undone yet, tried again"
            _log.error("%s of %s: %s: %s", one.entry.act, one.entry.container, what, one.error or one.outcome)
        self._done = None if left else self._stamp()
        self._again = self._clock() + _RETRY_SECONDS if left else 0.0
        return not left

    def _stamp(self) -> Stamp | None:
        try:
            found = os.stat(self._ledger)
        except FileNotFoundError:
            return (0, 0, 0)  # no agent has ever enforced here
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def main() -> None:
    """`python -m enforce.recovery.backstop SETTINGS`: started by the agent, never by hand."""
    settings = BackstopSettings(**json.loads(sys.argv[1]))
    logs.configure(logs.Format(settings.log_format))
    backstop = Backstop(Beats.shared(settings.beats), Path(settings.ledger), settings.agent_tgid)
    alive = sys.stdin.fileno()  # at its end: no process has the writing end any more
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    except PermissionError:
        _log.info("no CAP_SYS_NICE: resuming may be late under load")
    while not select.select([alive], [], [], LOOK_NS / 1e9)[0]:
        backstop.look()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what ended them may be sent to this process too
    sys.exit(0 if backstop.finish() else 1)


if __name__ == "__main__":
    main()
