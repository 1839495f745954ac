# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The two sides that share a GPU: a service that requests arrive at, round by round, and offline work.

Each is a program of sim/workloads, which serves one round and is then started anew, or one of conformance/programs,
which lasts. Either is asked to end before it is killed: under MPS a client that dies with work under way can hurt
others.
"""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from agent.core.errors import SetupError
from conformance.checks.enforcement.throughput import Point, read_points, since
from conformance.host import Host
from tools.harness.arrivals import write_trace
from tools.harness.stage import GpuNode, Stage, Workload

PROGRAMS: Final = Path(__file__).parents[1] / "programs"
_SIMULATED_ITERATIONS: Final = 100  # the simulated GPU goes by the time that it is given
_ENDING_SECONDS: Final = 5.0
_ENDLESS: Final = ["--seconds", "1e6", "--drain-seconds", "1e6"]  # it ends with its arrivals


@dataclass(frozen=True, slots=True)
class Program:
    """One side, as it is started. `torch`: one of conformance/programs, else one of sim/workloads."""

    words: tuple[str, ...]
    torch: bool = False

    def command(self, host: Host, role: str) -> list[str]:
        """The beginning of its command line; more options may follow."""
        if self.torch:
            return [host.python, str(PROGRAMS / f"{role}_torch.py"), *self.words]
        speed = str(iterations_per_us(host, self.shape))
        return [str(host.workloads / role), *self.words, "--iterations-per-us", speed]

    @property
    def shape(self) -> tuple[str, ...]:
        """How many blocks of how many threads, as options: what the speed of the spin kernel's loop depends on."""
        options = zip(self.words, self.words[1:], strict=False)
        return tuple(word for option in options if option[0] in ("--blocks", "--threads") for word in option)


_measured: Final[dict[tuple[str, ...], int]] = {}


def iterations_per_us(host: Host, shape: tuple[str, ...]) -> int:
    """Of the spin kernel's loop in this shape. SetupError where it cannot be measured.

    Once, and before others run: a program that measures it beside them takes them for a slow clock.
    """
    if host.simulated:
        return _SIMULATED_ITERATIONS
    if shape not in _measured:
        done = host.run([str(host.workloads / "offline"), *shape, "--kernels", "1", "--steps", "1"], timeout=30.0)
        if done.returncode:
            raise SetupError(f"offline ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        _measured[shape] = int(json.loads(done.stdout.removeprefix("ready\n"))["iterations_per_us"])
    return _measured[shape]


@dataclass(frozen=True, slots=True)
class Request:
    """Times of a request in seconds; its arrival since the start of the round."""

    arrival_s: float
    latency_s: float
    service_s: float


@dataclass(slots=True)
class Service:
    """The online side."""

    host: Host
    stage: Stage[GpuNode]
    program: Program
    folder: Path
    extra: Mapping[str, str] = field(default_factory=dict)  # of its environment
    _workload: Workload | None = None
    _wanted: int = 0
    _played: bool = False

    def measure(self) -> None:
        """What has to be known of the device before anybody uses it."""
        self.program.command(self.host, "online")

    def prepare(self) -> None:
        """Starts it, unless it runs and can play another round. Returns once it is warm."""
        if self._played and not self.program.torch:
            self.end()
        if self._workload is None:
            self.folder.mkdir(exist_ok=True)
            write_trace([], self._trace)
            rest = ["--trace", str(self._trace), "--log", str(self._log)]
            rest += ["--facts", str(self._facts)] if self.program.torch else _ENDLESS
            self._workload = self.stage.run("online", [*self.program.command(self.host, "online"), *rest], self.extra)

    def begin(self, arrivals: Sequence[float]) -> None:
        """Starts a round of a service that is prepared: the first request arrives now."""
        assert self._workload
        write_trace(arrivals, self._trace)  # read at the beginning of a round
        if self.program.torch:
            self._log.unlink(missing_ok=True)  # which it makes in each round, and the other one at its start
        self._wanted, self._played = len(arrivals), True
        self.stage.go(self._workload)

    def is_done(self) -> bool:
        """Whether all that arrived are served. SetupError when it ended without."""
        assert self._workload
        runs = self._workload.process.poll() is None
        served = self._log.read_bytes().count(b"\n") if self._log.exists() else 0
        if served < self._wanted and not runs:
            self._workload.require_alive()
        return served >= self._wanted

    def requests(self) -> tuple[Request, ...]:
        """Requests of the last round, as far as it got."""
        text = self._log.read_text() if self._log.exists() else ""
        rows = (line.split() for line in text[: text.rfind("\n") + 1].splitlines())
        return tuple(Request(float(arrival), float(latency), float(service)) for arrival, latency, service in rows)

    def facts(self) -> dict[str, Any]:
        """What it says of itself; nothing, where it is one of sim/workloads."""
        return dict(json.loads(self._facts.read_text())) if self._facts.exists() else {}

    def end(self) -> None:
        """Ends it, where it runs."""
        if self._workload is not None:
            _end(self.stage, self._workload)
        self._workload, self._played = None, False

    @property
    def _trace(self) -> Path:
        return self.folder / "arrivals"

    @property
    def _log(self) -> Path:
        return self.folder / "requests.log"

    @property
    def _facts(self) -> Path:
        return self.folder / "online.json"


@dataclass(slots=True)
class Batch:
    """The offline side."""

    host: Host
    stage: Stage[GpuNode]
    program: Program
    folder: Path
    extra: Mapping[str, str] = field(default_factory=dict)
    _workload: Workload | None = None
    _begun: Point = (0, 0.0)

    def measure(self) -> None:
        """What has to be known of the device before anybody uses it."""
        self.program.command(self.host, "offline")

    def prepare(self) -> None:
        """Starts one that waits for `begin`. One of sim/workloads would begin at once."""
        if self.program.torch and self._workload is None:
            self._start(["--facts", str(self._facts)])

    def begin(self) -> None:
        """Starts its work."""
        self.prepare()
        if self._workload is None:
            self._start(["--seconds", "0"])
            self._begun = (time.monotonic_ns(), 0.0)
            return
        assert self._workload.process.stdin
        done = self._points()[-1][1] if self._points() else 0.0
        self._begun = (time.monotonic_ns(), done)
        self._workload.process.stdin.write(b"g")
        self._workload.process.stdin.flush()

    def pause(self) -> None:
        """Nothing of its work is under way any more. One that takes no commands, or does not answer, is ended."""
        if self._workload is None:
            return
        self._workload.require_alive()
        if not self.program.torch or not self._stops():
            self.end()

    def points(self) -> list[Point]:
        """Its work since it began."""
        return since(self._points(), self._begun)

    def facts(self) -> dict[str, Any]:
        """What it says of itself; nothing, where it is one of sim/workloads."""
        return dict(json.loads(self._facts.read_text())) if self._facts.exists() else {}

    def end(self) -> None:
        """Ends it, where it runs."""
        if self._workload is not None:
            _end(self.stage, self._workload)
            self._workload = None

    def _start(self, rest: Sequence[str]) -> None:
        self.folder.mkdir(exist_ok=True)
        self._log.unlink(missing_ok=True)
        command = [*self.program.command(self.host, "offline"), *rest, "--log", str(self._log)]
        self._workload = self.stage.run("offline", command, self.extra)

    def _stops(self) -> bool:
        assert self._workload
        assert self._workload.process.stdin
        assert self._workload.process.stdout
        os.kill(self._workload.process.pid, signal.SIGCONT)
        self._workload.process.stdin.write(b"p")
        self._workload.process.stdin.flush()
        return _says_a_line(self._workload.process.stdout.fileno(), _ENDING_SECONDS)

    def _points(self) -> list[Point]:
        return read_points(self._log.read_text()) if self._log.exists() else []

    @property
    def _log(self) -> Path:
        return self.folder / "steps.log"

    @property
    def _facts(self) -> Path:
        return self.folder / "offline.json"


def prepare(service: Service, batch: Batch) -> None:
    """Both, at the same time: what takes long is to load a framework."""
    with ThreadPoolExecutor(2) as pool:
        for started in [pool.submit(service.prepare), pool.submit(batch.prepare)]:
            started.result()


def _says_a_line(descriptor: int, seconds: float) -> bool:
    """Byte by byte, so that nothing stays in a buffer of ours."""
    deadline = time.monotonic() + seconds
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        byte = os.read(descriptor, 1)
        if byte in (b"", b"\n"):
            return byte == b"\n"
    return False


def _end(stage: Stage[GpuNode], workload: Workload) -> None:
    for number in (signal.SIGCONT, signal.SIGTERM):
        with suppress(ProcessLookupError):
            workload.process.send_signal(number)
    workload.wait(_ENDING_SECONDS)
    stage.end([workload])
