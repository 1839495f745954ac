# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden release`: undoes whatever a dead agent left in force, once or as a standby."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from agent.core import logs
from agent.core.text import printable
from enforce.actuators.undo import release_all
from enforce.ledger import ledger
from enforce.ledger.entries import UndoOutcome
from enforce.recovery.backstop import STAND_BY_SECONDS, StandBy
from gpuwarden.options import DEFAULT_RUN_DIR, RUN_DIR_HELP, signal_receiver


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden release`."""
    add = parser.add_argument
    add("--run-dir", type=Path, default=DEFAULT_RUN_DIR, help=RUN_DIR_HELP)
    add(
        "--stand-by",
        action="store_true",
        help="keep running, and undo whenever an agent and its guardian are gone, until SIGTERM",
    )


def act(options: argparse.Namespace) -> int:
    """Exit code 0 when every entry is closed, else 1. LedgerError: the ledger cannot be read."""
    if options.stand_by:
        return _stand_by(options.run_dir)
    path = options.run_dir / "ledger.jsonl"
    if (why := ledger.unreadable(path)) is not None:
        raise ledger.LedgerError(f"nothing is undone, though something may be in force: {path} {why}")
    released = release_all(path)
    for one in released:
        what = one.entry.place if one.entry.process is None else f"process {one.entry.process.tgid}"
        print(printable(f"{one.entry.container}: {one.entry.act}: {what}: {one.outcome} {one.error or ''}"))
    resumed = sum(one.outcome is UndoOutcome.RESUMED for one in released)
    print(f"{resumed} processes resumed, {len(released)} entries looked at")
    return 0 if all(one.closed for one in released) else 1


def _stand_by(run_dir: Path) -> int:
    receive = signal_receiver(signal.SIGTERM, signal.SIGINT)
    stand_by = StandBy(run_dir)
    stand_by.look()
    logs.say("standby: waiting for an agent and its guardian to be gone")
    while (number := receive(STAND_BY_SECONDS)) is None:
        stand_by.look()
    return 0 if stand_by.finish(receive if number == signal.SIGTERM else None) else 1
