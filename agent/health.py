# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""/livez and /readyz, for whoever restarts the agent and whoever waits for it.

Alive: ticks complete, and where a policy is in force decisions are made. Ready: the first tick is over, and of the
copies of libcuda that were found one at least has probes; where none was found yet there is nothing to attach to, and
the agent is ready for the first one. Neither names anything, so that anybody may ask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.model import Snapshot

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

START_NS: Final = 60 * NS_PER_SECOND  # for the first tick: every copy of libcuda is attached before it
SLACK_NS: Final = 10 * NS_PER_SECOND
MISSED: Final = 5  # ticks
_PLAIN: Final = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"))
Sick = Callable[[], str | None]  # why; None: well


class Health:
    """`decided_ns`: when the last decision was completed; None while none are made."""

    def __init__(
        self,
        get_snapshot: Callable[[], Snapshot | None],
        decided_ns: Callable[[], int | None],
        interval_ns: int,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self._get_snapshot, self._decided_ns, self._now_ns = get_snapshot, decided_ns, now_ns
        self._patience_ns = MISSED * interval_ns + SLACK_NS
        self._began_ns = now_ns()

    def routes(self) -> Mapping[str, WSGIApplication]:
        """By path."""
        return {"/livez": _application(self.not_alive), "/readyz": _application(self.not_ready)}

    def not_alive(self) -> str | None:
        """Why the agent should be started anew; None: it works."""
        snapshot, now = self._get_snapshot(), self._now_ns()
        if snapshot is None:
            started = now - self._began_ns <= START_NS
            return None if started else f"no tick was completed in the {_seconds(now - self._began_ns)} since the start"
        if now - snapshot.at_ns > self._patience_ns:
            return f"no tick was completed for {_seconds(now - snapshot.at_ns)}"
        decided = self._decided_ns()
        if decided is not None and now - decided > self._patience_ns:
            return f"no decision was completed for {_seconds(now - decided)}"
        return None

    def not_ready(self) -> str | None:
        """Why not to count on it yet; None: it sees what there is to see."""
        snapshot = self._get_snapshot()
        if snapshot is None:
            return "the first tick is not over"
        if snapshot.probes and not any(library.attached for library in snapshot.probes):
            return f"{len(snapshot.probes)} copies of libcuda were found and no probe could be attached: see the log"
        return None


def _application(sick: Sick) -> WSGIApplication:
    def application(_: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        why = sick()
        start_response("200 OK" if why is None else "503 Service Unavailable", [*_PLAIN])
        return [b"ok\n" if why is None else f"{why}\n".encode()]

    return application


def _seconds(ns: int) -> str:
    return f"{ns / NS_PER_SECOND:.0f} s"
