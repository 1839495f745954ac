# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The rungs beyond gate and pace, and what they share. Until somebody applies one, nothing is done to anybody.

Only who enforces watches MPS servers for faults, as those are acted upon where they are seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from agent.model import ContainerKey, Snapshot
from agent.observer import Observer
from enforce.actuators.evict import Evict
from enforce.actuators.freeze import Freeze
from enforce.actuators.lock import Lock
from enforce.actuators.mps import Mps
from enforce.actuators.swap import Swap
from enforce.checkpoint.acting import Checkpoints
from enforce.checkpoint.library import DriverLibrary
from enforce.ladder import Reasons
from enforce.ledger import Ledger
from enforce.model import Rung
from enforce.mps.clients import AllClients
from enforce.mps.faults import Faults
from enforce.mps.survey import Survey
from enforce.roster import Seat


@dataclass(frozen=True, slots=True)
class Toolbox:
    """See the module. `look` is to be called at every decision."""

    table: Mapping[str, Rung]
    freeze: Freeze
    mps: Mps
    faults: Faults | None

    @classmethod
    def of(cls, observer: Observer, ledger: Ledger | None) -> Self:
        """Without a ledger nothing of it may be applied: then it only says what stands in the way."""
        proc = observer.proc

        def others(container: ContainerKey) -> frozenset[int]:
            members = observer.members.all()
            return frozenset(member.process.id.tgid for member in members if member.container.key != container)

        survey = Survey(proc)
        checkpoints = Checkpoints(ledger, DriverLibrary(observer.libcuda), proc)
        freeze, mps = Freeze(proc, others), Mps(proc, survey)
        rungs: tuple[Rung, ...] = (
            freeze,
            mps,
            Lock(checkpoints),
            Swap(checkpoints, device_bytes=lambda key: _device_bytes(observer.snapshot(), key)),
            Evict(proc, AllClients(proc)),
        )
        return cls({rung.name: rung for rung in rungs}, freeze, mps, Faults(survey) if ledger is not None else None)

    def look(self, here: Mapping[ContainerKey, Seat], snapshot: Snapshot) -> dict[ContainerKey, Reasons]:
        """Has MPS looked at where a rule is about it; whom its faults want gone. Does not block."""
        self.mps.look(here, snapshot)
        if self.faults is None:
            return {}
        self.faults.look(here, snapshot)
        return {key: {"evict": why} for key, why in self.faults.wanted.items()}

    def losses(self) -> dict[str, int]:
        """For Snapshot.lost."""
        return {**self.mps.losses(), **(self.faults.losses() if self.faults else {})}

    def close(self) -> None:
        """Ends the threads of those that have any."""
        self.freeze.close()


def _device_bytes(snapshot: Snapshot | None, container: ContainerKey) -> int | None:
    """What the container holds on all devices; None where one of them does not tell."""
    rows = [row for row in snapshot.containers if row.container.key == container] if snapshot else []
    held = [usage.memory_bytes for row in rows for usage in row.usage]
    known = [one for one in held if one is not None]
    return sum(known) if held and len(known) == len(held) else None
