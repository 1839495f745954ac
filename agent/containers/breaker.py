# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""When a socket that failed may be asked again: after 1 s, doubled by each failure in a row, to a minute. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from agent.clock import NS_PER_SECOND

_FIRST_WAIT_NS, _LONGEST_WAIT_NS = NS_PER_SECOND, 60 * NS_PER_SECOND
_MOST_DOUBLINGS = 6


@dataclass(slots=True)
class Breaker:
    """One per socket."""

    failures: int = 0  # in a row
    silent_until_ns: int = 0

    def allows(self, now_ns: int) -> bool:
        """Whether it may be asked now."""
        return now_ns >= self.silent_until_ns

    def failed(self, now_ns: int) -> None:
        """It did not answer, or not sensibly."""
        wait_ns = min(_FIRST_WAIT_NS << min(self.failures, _MOST_DOUBLINGS), _LONGEST_WAIT_NS)
        self.failures += 1
        self.silent_until_ns = now_ns + wait_ns

    def succeeded(self) -> None:
        """It answered, be it that it knows nothing."""
        self.failures, self.silent_until_ns = 0, 0
