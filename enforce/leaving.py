# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Ledger entries of processes that are released, but perhaps still stopped until the guardian gets to them."""

from __future__ import annotations

from collections.abc import Container

from agent.errors import GoneError, SetupError
from agent.model import ProcessId
from agent.procfs import Procfs
from enforce.ledger import Ledger

_STOPPED = "T"


class Leaving:
    """An entry is closed once its process is seen running, or gone."""

    def __init__(self, ledger: Ledger, proc: Procfs) -> None:
        self._ledger, self._proc = ledger, proc
        self._left: dict[str, ProcessId] = {}

    def add(self, entry_id: str, process: ProcessId) -> None:
        """Released just now."""
        self._left[entry_id] = process

    def close(self, held: Container[str]) -> None:
        """Closes what can be closed; entries in `held` are in force again. Raises LedgerError: then later."""
        for entry_id, process in list(self._left.items()):
            if self._is_stopped(process):
                continue
            if entry_id not in held:
                self._ledger.done(entry_id)
            del self._left[entry_id]

    def _is_stopped(self, process: ProcessId) -> bool:
        try:
            return self._proc.is_alive(process) and self._proc.stat(process.tgid).state == _STOPPED
        except GoneError:
            return False
        except SetupError:  # it cannot be read now
            return True
