# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`swap`: the device memory of a container goes to the host, and the device is free for others (cuCheckpoint…).

What is saved is in the memory of the host, on the container's account: where that has no room the kernel would kill
the process, so it is an obstacle. Going back needs room on the device; until then it stays saved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agent.model import ContainerKey
from enforce.checkpoint.acting import Checkpoints
from enforce.checkpoint.room import room_bytes
from enforce.entries import Entry
from enforce.model import Subject

_SPARE_RATIO = 0.1  # of the room, left for what else happens meanwhile
_GIB = 1 << 30


def _unknown(_key: ContainerKey) -> int | None:
    return None


@dataclass(slots=True)
class Swap:
    """A rung. Undone by `enforce.checkpoint.undoing.release_process`.

    `device_bytes` says how much a container has on its devices; None: not known, then the room is not looked at.
    """

    checkpoints: Checkpoints
    device_bytes: Callable[[ContainerKey], int | None] = _unknown
    host_bytes: Callable[[str], int | None] = room_bytes  # by the container's cgroup
    name: str = "swap"

    def obstacle(self, subject: Subject) -> str | None:
        """As of `lock`, and a host that has no room."""
        return self.checkpoints.obstacle(subject) or self._no_room(subject)

    def intents(self, subject: Subject) -> Sequence[Entry]:
        """One for each process; CheckpointError when somebody else has locked one."""
        return self.checkpoints.intents(self.name, subject)

    def apply(self, subject: Subject) -> None:
        """Locks and saves; takes as long as the memory takes over PCIe. CheckpointError."""
        self.checkpoints.apply("swap-out", subject)

    def _no_room(self, subject: Subject) -> str | None:
        wanted = self.device_bytes(subject.container.key)
        room = None if wanted is None else self.host_bytes(subject.container.cgroup)
        if wanted is None or room is None or wanted <= room * (1 - _SPARE_RATIO):
            return None
        return f"host memory has {room / _GIB:.1f} GiB left for the {wanted / _GIB:.1f} GiB that it holds on the device"
