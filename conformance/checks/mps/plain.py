# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The daemon's own program, run as it is: what the product's channel does, without Landlock and whatever else a
machine may lack. So all rows but those about that channel can be had wherever MPS runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from enforce.mps.channel import PATIENCE_SECONDS, Answer, Channel
from enforce.mps.model import MpsTimeoutError
from gpu.here import OVERDUE, Here


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain(Channel):
    """To a daemon that we have started. `extra`: the environment that leads to it."""

    here: Here
    extra: Mapping[str, str]

    def ask(self, arguments: Sequence[str] = (), given: str = "") -> Answer:
        """Runs the program. MpsError when there is no answer in time."""
        command = [self.daemon.program, *arguments]
        done = self.here.run(command, {**self.extra, "LC_ALL": "C"}, PATIENCE_SECONDS, given)
        if done.returncode == OVERDUE:
            raise MpsTimeoutError(f"the MPS control daemon did not answer in {PATIENCE_SECONDS:g} s")
        return Answer(done.returncode == 0, done.stdout + done.stderr)
