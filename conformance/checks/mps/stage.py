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

from gpu import clients, offspring
from gpu.clients import Client
from gpu.here import Here, Unavailable
from gpu.row import Figure, Row, Verdict
from gpu.stopping.brakes import StuckError
from gpu.stopping.warden import until

if TYPE_CHECKING:
    from enforce.mps.channel import Answer, Channel
    from enforce.mps.model import Control, Daemon, Server

NAME: Final = "mps"
_SERVER_SECONDS: Final = 15.0
_ACTIVE: Final = "ACTIVE"
_MOST_WORDS: Final = 300


@dataclass(frozen=True, slots=True)
class Stage:
    """`extra`: the environment of the daemon's clients."""

    here: Here
    extra: Mapping[str, str]

    @property
    def pipes(self) -> Path:
        """The daemon's folder."""
        return Path(self.extra["CUDA_MPS_PIPE_DIRECTORY"])

    @property
    def logs(self) -> Path:
        """Where daemon and servers write."""
        return Path(self.extra["CUDA_MPS_LOG_DIRECTORY"])

    @property
    def seconds(self) -> float:
        """Of one measurement of a rate."""
        return 0.3 if self.here.quick else 0.7

    def daemon(self) -> Daemon:
        """As it was started: the oldest process of its name that was given its folder. Unavailable."""
        from agent.model import ProcessId
        from enforce.mps.daemons import PROGRAM
        from enforce.mps.model import Daemon

        given = offspring.with_variable(f"CUDA_MPS_PIPE_DIRECTORY={self.pipes}")
        processes = set(given).intersection(offspring.named(PROGRAM))
        if not processes:
            raise Unavailable(f"no process has {self.pipes} as the folder of its MPS pipes: the daemon has ended")
        first = min(processes, key=lambda one: one.started)
        return Daemon(ProcessId(first.pid, first.started), str(self.pipes), str(self.here.mps_control()))

    def channel(self) -> Channel:
        """To it, wherever it is. Unavailable."""
        from gpu.mps.plain import Plain

        return Plain(self.daemon(), here=self.here, extra=self.extra)

    def control(self) -> Control:
        """In the language that it speaks. MpsError."""
        from enforce.mps.control import speak

        return speak(self.channel())

    def asked(self, command: str) -> Answer:
        """One line of protocol 2, with whatever comes back. MpsError when nothing does."""
        return self.channel().ask(given=f"{command}\n")

    def server(self) -> Server:
        """The one of this user, started if need be, once it is ready. Unavailable."""
        control = self.control()
        if not control.servers() and control.protocol == 2:
            self.asked(f"start_server -uid {os.getuid()}")
        try:
            until(lambda: any(one.status == _ACTIVE for one in control.servers()), "an active server", _SERVER_SECONDS)
        except StuckError as error:
            logged = " | ".join(self.logged()[-3:])[-_MOST_WORDS:]
            raise Unavailable(f"{error}; its log ends: {logged or 'empty'}") from error
        return next(one for one in control.servers() if one.status == _ACTIVE)

    def logged(self) -> list[str]:
        """What daemon and server wrote."""
        texts = [path.read_text(errors="replace") for path in sorted(self.logs.glob("*.log"))]
        return [" ".join(line.split()) for text in texts for line in text.split("\n") if line.strip()]

    @contextmanager
    def steps(self, *options: str, seconds: float = clients.START_SECONDS) -> Iterator[Client]:
        """A client that launches without end; `seconds` at most until it does."""
        command = clients.own(self.here, "steps", *options)
        made = clients.start(self.here, command, {**clients.importing(), **self.extra}, seconds)
        try:
            yield made
        finally:
            made.end()

    @contextmanager
    def holder(self, size: int) -> Iterator[Client]:
        """A client with so much device memory. Unavailable when it does not get it, with the error's name."""
        command = clients.own(self.here, "holder", "--bytes", str(size))
        made = clients.start(self.here, command, {**clients.importing(), **self.extra})
        try:
            yield made
        finally:
            made.end()


@contextmanager
def staged(here: Here) -> Iterator[Stage]:
    """A fresh daemon. Unavailable where there can be none."""
    with here.mps() as extra:
        yield Stage(here, extra)


def window(seconds: float) -> tuple[int, int]:
    """From now on for so long; it is over then."""
    since = time.monotonic_ns()
    time.sleep(seconds)
    return since, time.monotonic_ns()


def row(what: str, verdict: Verdict, figure: Figure, unit: str = "", baseline: Figure = None, note: Any = "") -> Row:
    """Of this item."""
    return Row(item=NAME, what=what, verdict=verdict, figure=figure, unit=unit, baseline=baseline, note=str(note))
