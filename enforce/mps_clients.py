# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether a process may be an MPS client, where nobody asks the daemons: it may, wherever a server runs."""

from __future__ import annotations

from dataclasses import dataclass

from agent.errors import GoneError, SetupError, WardenError
from agent.model import ProcessId
from agent.procfs import Procfs

_SERVER = "nvidia-cuda-mps"  # nvidia-cuda-mps-server and -control, as /proc cuts them


@dataclass(frozen=True, slots=True)
class AnyMps:
    """See `enforce.actuators.evict.MpsClients`."""

    proc: Procfs

    def terminate(self, process: ProcessId) -> bool:
        """False where no MPS runs at all; elsewhere WardenError."""
        for tgid in self.proc.tgids():
            try:
                found = self.proc.stat(tgid).comm == _SERVER
            except GoneError:
                continue
            except SetupError as error:
                raise WardenError(f"whether MPS runs here cannot be seen: {error}") from error
            if found:
                raise WardenError("an MPS server runs on this machine")
        return False
