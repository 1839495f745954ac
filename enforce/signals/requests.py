# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How many requests each online container had, and how many of them took longer than promised: ever, not lately.

The quantile of a window cannot be averaged over hours; two sums that only grow can, and that is what an SLO's burn rate
is made of. The signals add what is new here; whoever exports reads it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from agent.model import ContainerKey


@dataclass(frozen=True, slots=True)
class Counted:
    """Requests since the container is watched. `slow` may be a fraction: a bucket that holds the target is divided."""

    requests: int
    slow: float


class Requests:
    """Of each container that a signal looks at. For the deciding thread alone."""

    def __init__(self) -> None:
        self._of: dict[ContainerKey, Counted] = {}

    def add(self, container: ContainerKey, requests: int, slow: float) -> None:
        """These are new. None at all is worth saying too: then it is known that there were none."""
        before = self._of.get(container, Counted(0, 0.0))
        self._of[container] = Counted(before.requests + requests, before.slow + slow)

    def of(self, container: ContainerKey) -> Counted | None:
        """None: nobody could look yet."""
        return self._of.get(container)

    def forget(self, containers: Iterable[ContainerKey]) -> None:
        """Drops what is kept about containers that are gone."""
        for container in containers:
            self._of.pop(container, None)
