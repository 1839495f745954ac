# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`swap`: the device memory of a container goes to the host, and the device is free for others (cuCheckpoint…).

What is saved is in the memory of the host, on the container's account: a host that has no room for it would end in the
kernel's killing processes, so that is an obstacle. Going back needs room on the device; until then it stays saved.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from agent.model import ContainerKey
from enforce.checkpoint.acting import Checkpoints
from enforce.entries import Entry
from enforce.model import Subject

_MEMINFO = Path("/proc/meminfo")
_AVAILABLE = re.compile(r"^MemAvailable:\s+(\d+) kB$", re.MULTILINE)
_SPARE_RATIO = 0.1  # of what is available, left to everybody else
_GIB = 1 << 30


def available_bytes(meminfo: Path = _MEMINFO) -> int | None:
    """What the host can give without swapping; None where it does not say."""
    with suppress(OSError):
        found = _AVAILABLE.search(meminfo.read_text(encoding="ascii", errors="replace"))
        return int(found[1]) * 1024 if found else None
    return None


@dataclass(slots=True)
class Swap:
    """A rung. Undone by `enforce.checkpoint.undoing.release_process`.

    `device_bytes` says how much a container has on its devices; None: not known.
    """

    checkpoints: Checkpoints
    device_bytes: Callable[[ContainerKey], int | None] = lambda _: None
    host_bytes: Callable[[], int | None] = available_bytes
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
        wanted, available = self.device_bytes(subject.container.key), self.host_bytes()
        if wanted is None or available is None or wanted <= available * (1 - _SPARE_RATIO):
            return None
        return f"the host has {available / _GIB:.1f} GiB for the {wanted / _GIB:.1f} GiB that it holds on the device"
