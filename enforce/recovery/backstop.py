# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The backstop: a third process, which undoes what agent and guardian leave when both stand still or are killed.

It does nothing but look at two words of memory ten times a second, has no descriptor of a probe or map, and so hangs on
nothing that they hang on. Who lives is known by their beats; that both are dead, by a pipe of which only they have the
writing end. The kernel stops no process while the guardian stands still or is dead (its lease is over after 200 ms), so
what is resumed here stays so. Invariant: while one of the two lives no entry of the ledger is closed here, as they may
go on; once both are gone the run directory's lock says whether a new agent has taken over.

`Beats` is the page of memory on which the three show each other that they run. It is a memfd: it needs no file system
and no BPF, and lives as long as one of them. Each writes its own word, whole at once, so there is no lock to be killed
under. Times are CLOCK_MONOTONIC, which stands still while the machine sleeps.
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
from enforce.actuators.undo import AGAIN_NS, BackgroundUndo, MadeBy, UndoResult, acts_where, undo_all
from enforce.ledger import ledger
from enforce.ledger.entries import UndoOutcome
from enforce.ledger.run_lock import enforcing_elsewhere
from enforce.recovery.standby import StandBy

_log = logging.getLogger("gpuwarden.backstop")
LOOK_NS: Final = 100_000_000
STILL_NS: Final = 500_000_000  # ten rounds of the guardian, five decisions of the agent
_STOOD_STILL_NS = 3 * LOOK_NS  # without a look: the others have stood still as well, with all of the machine
_LATE_ACTS_SECONDS = 0.02  # a launch that passed the lease check just before it ended may still stop
_PATIENCE_SECONDS = 10.0  # for the lock, and for what cannot be undone at once
_AGAIN_SECONDS = 0.005
_STOPS: Final = acts_where(MadeBy.KERNEL)
_QUICK: Final = acts_where(quick=True)
_SLOW: Final = acts_where(quick=False)


class Beats(c.Structure):
    """When each of them last ran; 0: not yet."""

    _fields_ = [
        ("agent_ns", c.c_uint64),
        ("guardian_ns", c.c_uint64),
        ("backstop_ns", c.c_uint64),
        ("released_ns", c.c_uint64),  # when the backstop last resumed what the guardian holds
    ]
    agent_ns: int
    guardian_ns: int
    backstop_ns: int
    released_ns: int

    @classmethod
    def shared(cls, fd: int) -> Beats:
        """The page behind the descriptor, live."""
        return cls.from_buffer(mmap.mmap(fd, mmap.PAGESIZE))


def new_page() -> int:
    """The descriptor of a page of zeros. OSError."""
    fd = os.memfd_create("gpuwarden-beats")
    os.ftruncate(fd, mmap.PAGESIZE)
    return fd


class Duty(Enum):
    """What nobody else undoes now."""

    NOTHING = "nothing"
    STOPS = "stops"  # the agent lives, and does what is its own
    EVERYTHING = "everything"


def duty(agent_ns: int, guardian_ns: int, now_ns: int) -> Duty:
    """The backstop's, by the last beats of the others: the guardian undoes everything while it runs."""
    if now_ns - guardian_ns <= STILL_NS:
        return Duty.NOTHING
    return Duty.STOPS if now_ns - agent_ns <= STILL_NS else Duty.EVERYTHING


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

    def look(self) -> Duty:
        """Undoes what nobody else does now. Returns what that was."""
        now = self._clock()
        late, self._looked_ns = now - self._looked_ns > _STOOD_STILL_NS, now
        self._beats.backstop_ns = now
        if late:
            return Duty.NOTHING
        found = duty(self._beats.agent_ns, self._beats.guardian_ns, now)
        if found is Duty.NOTHING:
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

    def _undo(self, found: Duty) -> None:
        """Their entries stay. The guardian, should it go on meanwhile, is told to resume what it holds as well."""
        self._beats.released_ns = self._clock()
        if found is Duty.STOPS:
            _report("the guardian stands still", undo_all(self._path, acts=_STOPS))
        else:
            _report("agent and guardian stand still", undo_all(self._path, acts=_QUICK))
            self._slow.start_if_due()
        self._beats.released_ns = self._clock()


def _report(why: str, undone: list[UndoResult]) -> None:
    resumed = sum(one.outcome is UndoOutcome.RESUMED for one in undone)
    if resumed:
        _log.error("%s: undid %d of their acts", why, resumed)


def main() -> None:
    """`python -m enforce.recovery.backstop SETTINGS`: started by the agent, never by hand."""
    settings = BackstopSettings(**json.loads(sys.argv[1]))
    logs.configure(logs.Format(settings.log_format))
    backstop = Backstop(Beats.shared(settings.beats), Path(settings.ledger), settings.agent_tgid)
    alive = sys.stdin.fileno()  # at its end: nobody has the writing end any more
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    except PermissionError:
        _log.info("no CAP_SYS_NICE: resuming may be late under load")
    while not select.select([alive], [], [], LOOK_NS / 1e9)[0]:
        backstop.look()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # whatever ended them may mean this process too
    sys.exit(0 if backstop.finish() else 1)


if __name__ == "__main__":
    main()
