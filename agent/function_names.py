# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What each process's kernel functions are called: handle → name, as the program asked the driver for them.

Bounded by handles; equal names are kept once, since a hundred processes of one image have the same ones. Written by the
watcher's thread, read by the observing one.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

from agent.model import ProcessId
from agent.names import printable

_MOST = 100_000  # handles
LONGEST = 255  # characters
_SLACK = 1024


class FunctionNames:
    """See the module. `refused` counts names for which there was no room."""

    def __init__(self, most: int = _MOST) -> None:
        self._most, self._count = most, 0
        self._names: dict[ProcessId, dict[int, str]] = {}
        self._texts: dict[str, str] = {}
        self._lock = threading.Lock()
        self.refused = 0

    def __len__(self) -> int:
        return self._count

    def learn(self, process: ProcessId, function: int, name: str) -> None:
        """The handle has this name now; modules come and go, and so do handles."""
        text = printable(name, LONGEST)
        with self._lock:
            names = self._names.get(process)
            if names is None or function not in names:
                if self._count >= self._most:
                    self.refused += 1
                    return
                self._count += 1
                names = self._names.setdefault(process, {})
            names[function] = self._texts.setdefault(text, text)

    def alias(self, process: ProcessId, function: int, other: int) -> None:
        """`function` is called what `other` is."""
        name = self.name(process, other)
        if name:
            self.learn(process, function, name)

    def name(self, process: ProcessId, function: int) -> str:
        """ "" where nobody has told."""
        return self._names.get(process, {}).get(function, "")

    def forget(self, processes: Collection[ProcessId]) -> None:
        """They are gone."""
        with self._lock:
            for process in processes:
                self._count -= len(self._names.pop(process, ()))
            if len(self._texts) > 2 * self._count + _SLACK:
                self._texts = {text: text for names in self._names.values() for text in names.values()}

    def retain(self, processes: Collection[ProcessId]) -> None:
        """Forgets everybody else: a name may have come in after its process had been forgotten."""
        self.forget([process for process in list(self._names) if process not in processes])
