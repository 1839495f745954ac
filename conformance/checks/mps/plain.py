# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The daemon's own program, run as it is: what the product's channel does, without Landlock and whatever else a
machine may lack. So all rows but those about that channel can be had wherever MPS runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from conformance.host import OVERDUE, Host
from enforce.actuators.mps.channel import TIMEOUT_SECONDS, CommandAnswer, MpsChannel
from enforce.actuators.mps.model import MpsTimeoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(MpsChannel):
    """To a daemon that we have started. `extra`: the environment that leads to it."""

    host: Host
    extra: Mapping[str, str]

    def ask(self, arguments: Sequence[str] = (), given: str = "") -> CommandAnswer:
        """Runs the program. MpsError when there is no answer in time."""
        command = [self.daemon.program, *arguments]
        done = self.host.run(command, {**self.extra, "LC_ALL": "C"}, TIMEOUT_SECONDS, given)
        if done.returncode == OVERDUE:
            raise MpsTimeoutError(f"the MPS control daemon did not answer in {TIMEOUT_SECONDS:g} s")
        return CommandAnswer(done.returncode == 0, done.stdout + done.stderr)
