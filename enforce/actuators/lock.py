# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`lock`: the container's CUDA calls wait inside the driver until they are let go on (cuCheckpointProcessLock).

Its processes run on otherwise, unlike with `freeze`: they answer their health checks. Their device memory stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from enforce.checkpoint.acting import Checkpoints
from enforce.entries import Entry
from enforce.model import Subject


@dataclass(slots=True)
class Lock:
    """A rung. Undone by `enforce.checkpoint.undoing.release_process`."""

    checkpoints: Checkpoints
    name: str = "lock"

    def obstacle(self, subject: Subject) -> str | None:
        """No driver with the calls, an MPS client, a frozen process."""
        return self.checkpoints.obstacle(subject)

    def intents(self, subject: Subject) -> Sequence[Entry]:
        """One for each process; CheckpointError when somebody else has locked one."""
        return self.checkpoints.intents(self.name, subject)

    def apply(self, subject: Subject) -> None:
        """Waits for what is queued to drain, at most for `helper.LOCK_LIMIT_MS` each; CheckpointError."""
        self.checkpoints.apply("lock", subject)
