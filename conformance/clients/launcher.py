# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Programs that use the GPU and talk lines of JSON, and the online workload: started, asked, ended; their records."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import Popen
from typing import Any, Final

from conformance.host import Host, Unavailable
from conformance.machine_state import ROOT
from tools.harness.wait import poll

START_SECONDS: Final = 30.0  # the first context of a driver may take that long
_LEAST_WORDS: Final = 300  # of a failed program's stderr, from its end


class SilenceError(Exception):
    """A program did not answer in time, or has ended."""


@dataclass(slots=True)
class Client:
    """A running program. Only `hear` reads its output."""

    host: Host
    process: Popen[str]
    ready: Mapping[str, Any] = field(default_factory=dict)  # its first line
    _rest: bytes = b""

    @property
    def tgid(self) -> int:
        """Its pid."""
        return self.process.pid

    @property
    def pace(self) -> tuple[str, str]:
        """Of one that measured it: options for others, which need no idle device of their own then."""
        return ("--iterations-per-us", str(self.ready["iterations_per_us"]))

    def hear(self, seconds: float) -> dict[str, Any]:
        """Its next line of JSON; lines that are none are passed over. SilenceError."""
        deadline = time.monotonic() + seconds
        while True:
            found = _record(self._line(deadline))
            if found is not None:
                return found

    def ask(self, command: str, seconds: float) -> dict[str, Any]:
        """Sends a line; the next record."""
        self.say(command)
        return self.hear(seconds)

    def say(self, command: str) -> None:
        """Sends a line. SilenceError when the program no longer reads."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{command}\n")
            self.process.stdin.flush()
        except (OSError, ValueError) as error:
            raise SilenceError(self._why("is no longer there")) from error

    def finish(self, seconds: float = 20.0) -> dict[str, Any]:
        """Asks it to end, waits for it; its last record."""
        with suppress(ProcessLookupError):
            os.kill(self.tgid, signal.SIGCONT)
            os.kill(self.tgid, signal.SIGTERM)
        try:
            return self.hear(seconds)
        finally:
            self.end()

    def end(self) -> None:
        """Ends it, whatever it does."""
        self.host.end(self.process)

    def _line(self, deadline: float) -> bytes:
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise SilenceError(self._why("did not answer in time"))
            given = os.read(descriptor, 1 << 16)
            if not given:
                raise SilenceError(self._why("has ended"))
            self._rest += given
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _why(self, what: str) -> str:
        return f"{_name(self.process.args)} {what}{_last_words(self.process)}"


def start(
    host: Host, command: Sequence[str], extra: Mapping[str, str] | None = None, seconds: float = START_SECONDS
) -> Client:
    """A program that says {"ready": true} first. Unavailable when it says something else, SilenceError when nothing."""
    client = Client(host, host.start(command, extra))
    try:
        client.ready = client.hear(seconds)
    except SilenceError:
        client.end()
        raise
    if not client.ready.get("ready"):
        client.end()
        raise Unavailable(f"{_name(client.process.args)}: {client.ready.get('error') or client.ready}")
    return client


def module(name: str, *arguments: str) -> list[str]:
    """The command of a module of ours."""
    return [sys.executable, "-m", name, *arguments]


def own(host: Host, name: str, *arguments: str) -> list[str]:
    """The command of a program in conformance/programs that takes the driver library. Unavailable where there is
    none."""
    return module(f"conformance.clients.{name}", "--library", library(host), *arguments)


def library(host: Host) -> str:
    """The driver's."""
    if host.libcuda is None:
        raise Unavailable("no libcuda.so.1 on this machine")
    return str(host.libcuda)


def importing() -> dict[str, str]:
    """The environment in which `module` finds our modules, wherever it is started."""
    given = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": f"{ROOT}:{given}" if given else str(ROOT)}


@dataclass(frozen=True, slots=True)
class Request:
    """Times of a request of the online workload; CLOCK_MONOTONIC."""

    arrived_ns: int
    ended_ns: int
    service_ns: int  # from its first launch until its wait returned

    @property
    def latency_ns(self) -> int:
        """Latency, with the time in the queue."""
        return self.ended_ns - self.arrived_ns

    @property
    def begun_ns(self) -> int:
        """Time of its first launch."""
        return self.ended_ns - self.service_ns


class Online:
    """The online workload, with a request log. `finish` gives the requests."""

    def __init__(
        self, host: Host, arguments: Sequence[str], extra: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        self._here = host
        self._log = host.folder / f"online-{time.monotonic_ns()}.log"
        self._json = self._log.with_suffix(".json")
        files = ["--log", str(self._log), "--json", str(self._json), "--seconds", "600"]
        self.process = host.start([*prefix, str(host.workloads / "online"), *arguments, *files], extra)
        assert self.process.stdout is not None
        descriptor, output = self.process.stdout.fileno(), b""
        deadline = time.monotonic() + START_SECONDS
        while b"ready\n" not in output:
            left = deadline - time.monotonic()
            given = os.read(descriptor, 4096) if left > 0 and select.select([descriptor], [], [], left)[0] else b""
            if not given:
                host.end(self.process)
                raise SilenceError(f"online did not start{_last_words(self.process)}")
            output += given

    def go(self) -> None:
        """Releases it: its first request arrives now."""
        assert self.process.stdin is not None
        self.process.stdin.write("g")
        self.process.stdin.flush()

    def finish(self, seconds: float = 20.0) -> list[Request]:
        """Ends it; its requests. SilenceError when that takes too long, or it failed before."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGCONT)
            os.kill(self.process.pid, signal.SIGTERM)
        poll(lambda: self.process.poll() is not None, seconds)
        status = self.process.poll()
        words = _last_words(self.process) if status else ""
        self._here.end(self.process)
        if status != 0:
            raise SilenceError(f"online did not end by itself (status {status}){words}")
        begun = int(json.loads(self._json.read_text())["started_monotonic_ns"])
        return requests(self._log.read_text(), begun)


def requests(log: str, begun_ns: int) -> list[Request]:
    """Of lines of three numbers: arrival, latency and service in seconds. A last line that is cut short is left out."""
    found = []
    for line in log.split("\n")[:-1]:
        arrival, latency, service = (round(float(word) * 1e9) for word in line.split())
        found.append(Request(begun_ns + arrival, begun_ns + arrival + latency, service))
    return found


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _name(arguments: object) -> str:
    words = [str(word) for word in arguments] if isinstance(arguments, (list, tuple)) else [str(arguments)]
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return next((Path(word).name for word in words if word.endswith(".py")), Path(words[0]).name)


def _last_words(process: Popen[str]) -> str:
    """The rest of its stderr."""
    if process.stderr is None or process.stderr.closed:
        return ""
    output = b""
    with suppress(OSError):
        while select.select([process.stderr.fileno()], [], [], 0.2 if not output else 0)[0]:
            given = os.read(process.stderr.fileno(), 1 << 16)
            if not given:
                break
            output += given
    text = " ".join(output.decode(errors="replace").split())[-_LEAST_WORDS:]
    return f": {text}" if text else ""
