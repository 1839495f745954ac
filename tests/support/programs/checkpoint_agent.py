# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An agent that applies one checkpoint rung, step by step, for tests that kill it in between.

`python -m tests.support.programs.checkpoint_agent lock|swap LEDGER TGID` prints "intended" when the entries are in the
ledger and "applied" when the rung is applied; then it waits until its stdin is closed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from agent.core.model import Container, ContainerKey
from agent.node.procfs import Procfs
from enforce.actuators.checkpoint.helper import DriverLibrary
from enforce.actuators.checkpoint.rungs import Checkpoints, Lock, Swap
from enforce.ledger.ledger import Ledger
from enforce.model import Subject
from tools.harness.node import BUILD

KEY = ContainerKey("docker:abc")
LIBCUDA = str(BUILD / "lib" / "libcuda.so.1")


def subject_of(*tgids: int) -> Subject:
    """The container KEY with these processes, as the rungs get it."""
    processes = tuple(Procfs().process_id(tgid) for tgid in tgids)
    return Subject(Container(KEY, "training", "docker"), processes, frozenset(), rule=None)  # type: ignore[arg-type]


def main(name: str, path: Path, tgid: int) -> None:
    """See the module."""
    ledger, subject = Ledger(path), subject_of(tgid)
    checkpoints = Checkpoints(ledger, DriverLibrary((LIBCUDA,)))
    rung = Lock(checkpoints) if name == "lock" else Swap(checkpoints)
    for entry in rung.intents(subject):
        ledger.intend(entry)
    print("intended", flush=True)
    rung.apply(subject)
    print("applied", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
