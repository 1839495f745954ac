# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A daemon of one's own, spoken to by its own program and read with the product's parsers; and clients of it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from conformance import process_tree
from conformance.checks.stopping.holds import StuckError
from conformance.clients import launcher
from conformance.clients.launcher import Client
from conformance.host import Host, Unavailable
from conformance.report.model import Figure, Row, Verdict
from tools.harness.wait import until

if TYPE_CHECKING:
    from enforce.actuators.mps.channel import CommandAnswer, MpsChannel
    from enforce.actuators.mps.model import Daemon, MpsControl, MpsServer

NAME: Final = "mps"
_SERVER_SECONDS: Final = 15.0
_ACTIVE: Final = "ACTIVE"
_MOST_WORDS: Final = 300


@dataclass(frozen=True, slots=True)
class Stage:
    """`extra`: the environment of the daemon's clients."""

    host: Host
    extra: Mapping[str, str]

    @property
    def pipes(self) -> Path:
        """The daemon's folder."""
        return Path(self.extra["CUDA_MPS_PIPE_DIRECTORY"])

    @property
    def logs(self) -> Path:
        """The folder of daemon's and servers' logs."""
        return Path(self.extra["CUDA_MPS_LOG_DIRECTORY"])

    @property
    def seconds(self) -> float:
        """Length of one measurement of a rate."""
        return 0.3 if self.host.quick else 0.7

    def daemon(self) -> Daemon:
        """As it was started: the oldest process of its name that was given its folder. Unavailable."""
        from agent.core.model import ProcessId
        from enforce.actuators.mps.daemons import PROGRAM
        from enforce.actuators.mps.model import Daemon

        given = process_tree.with_variable(f"CUDA_MPS_PIPE_DIRECTORY={self.pipes}")
        processes = set(given).intersection(process_tree.named(PROGRAM))
        if not processes:
            raise Unavailable(f"no process has {self.pipes} as the folder of its MPS pipes: the daemon has ended")
        first = min(processes, key=lambda one: one.started)
        return Daemon(ProcessId(first.pid, first.started), str(self.pipes), str(self.host.mps_control()))

    def channel(self) -> MpsChannel:
        """A channel to the daemon's control socket or pipe. Unavailable."""
        from conformance.checks.mps.plain import Plain

        return Plain(self.daemon(), host=self.host, extra=self.extra)

    def control(self) -> MpsControl:
        """The control language that the daemon speaks. MpsError."""
        from enforce.actuators.mps.protocol3 import connect_over

        return connect_over(self.channel())

    def asked(self, command: str) -> CommandAnswer:
        """One line of protocol 2, with whatever comes back. MpsError when nothing does."""
        return self.channel().ask(given=f"{command}\n")

    def server(self) -> MpsServer:
        """The one of this user, started if need be, once it is ready. Unavailable."""
        control = self.control()
        if not control.servers() and control.protocol == 2:
            self.asked(f"start_server -uid {os.getuid()}")
        try:
            until(
                lambda: any(one.status == _ACTIVE for one in control.servers()),
                "an active server",
                _SERVER_SECONDS,
                error=StuckError,
            )
        except StuckError as error:
            logged = " | ".join(self.logged()[-3:])[-_MOST_WORDS:]
            raise Unavailable(f"{error}; its log ends: {logged or 'empty'}") from error
        return next(one for one in control.servers() if one.status == _ACTIVE)

    def logged(self) -> list[str]:
        """The lines of daemon's and servers' logs."""
        texts = [path.read_text(errors="replace") for path in sorted(self.logs.glob("*.log"))]
        return [" ".join(line.split()) for text in texts for line in text.split("\n") if line.strip()]

    @contextmanager
    def steps(self, *options: str, seconds: float = launcher.START_SECONDS) -> Iterator[Client]:
        """A client that launches without end; `seconds` at most until it does."""
        command = launcher.own(self.host, "steps", *options)
        made = launcher.start(self.host, command, {**launcher.importing(), **self.extra}, seconds)
        try:
            yield made
        finally:
            made.end()

    @contextmanager
    def holder(self, size: int) -> Iterator[Client]:
        """A client with so much device memory. Unavailable when it does not get it, with the error's name."""
        command = launcher.own(self.host, "holder", "--bytes", str(size))
        made = launcher.start(self.host, command, {**launcher.importing(), **self.extra})
        try:
            yield made
        finally:
            made.end()


@contextmanager
def staged(host: Host) -> Iterator[Stage]:
    """A fresh daemon. Unavailable where there can be none."""
    with host.mps() as extra:
        yield Stage(host, extra)


def window(seconds: float) -> tuple[int, int]:
    """CLOCK_MONOTONIC ns of a window that begins now; returns at its end."""
    since = time.monotonic_ns()
    time.sleep(seconds)
    return since, time.monotonic_ns()


def row(what: str, verdict: Verdict, figure: Figure, unit: str = "", baseline: Figure = None, note: Any = "") -> Row:
    """A row of this item."""
    return Row(item=NAME, what=what, verdict=verdict, figure=figure, unit=unit, baseline=baseline, note=str(note))
