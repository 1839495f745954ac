# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The policy file over time: reads it, and tells when there is another one.

It is looked at with `stat`, which follows links: an edit in place, a rename over it and a ConfigMap's swapped `..data`
all show as another stamp. inotify would need a watch on every directory that a link leads through, set anew after each
swap, and tells nothing on network file systems; a system call a second is the simpler price.
"""

from __future__ import annotations

import os
from pathlib import Path

from enforce.policy.load import Judged, examine
from enforce.policy.model import Policy

Stamp = tuple[int, int, int, int, int]


class PolicyFile:
    """One path, whatever lies there. `judged`: what is wrong with what was read last; None: nothing."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.judged: Judged | None = None
        self._read: Stamp | None = None  # of what was read last
        self._seen: Stamp | None = None  # at the last look

    def exists(self) -> bool:
        """Whether there is anything to read."""
        return _stamp(self.path) is not None

    def load(self) -> Policy:
        """The policy in it now. Raises PolicyError."""
        self._read = self._seen = _stamp(self.path)  # before it is read: whoever writes later has changed it
        judged = examine(self.path, strict_permissions=True)
        self.judged = judged if judged.policy is None else None
        if not judged.was_read:
            self._read = None  # it is tried again: there may be no descriptor left, or a disk that fails
        return judged.accepted()

    def changed(self) -> bool:
        """Whether it differs from what was read last, and is as at the last call: nobody is at work on it."""
        before, self._seen = self._seen, _stamp(self.path)
        return self._seen == before != self._read


def _stamp(path: Path) -> Stamp | None:
    """None: there is none, or nothing that can be read."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
