# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One command to nvidia-cuda-mps-control, in bounded time and with a bounded answer.

A control daemon that hangs keeps its command program waiting for ever, so that is ended, and only that. The program
follows the protocol of the daemon that runs, whatever it is told itself.

The daemon's directory may be a container's. It is found as the daemon finds it, and handed over as a descriptor; what
lies in it leads the program to nothing that it could change elsewhere (enforce/mps/confined.py).
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from agent import foreign
from agent.errors import GoneError, SetupError
from agent.names import printable
from agent.procfs import Procfs
from enforce.mps.confined import confine
from enforce.mps.model import Daemon, MpsError, MpsTimeoutError

PATIENCE_SECONDS = 5.0
MOST_BYTES = 1 << 20
_REAP_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command said, and whether it succeeded."""

    fine: bool
    text: str


@dataclass(frozen=True, slots=True)
class Channel:
    """The way to one daemon."""

    daemon: Daemon
    patience_seconds: float = PATIENCE_SECONDS
    proc: Procfs = field(default_factory=Procfs)

    def ask(self, arguments: Sequence[str] = (), given: str = "") -> Answer:
        """Runs the program. MpsError when there is no answer at all, in time or of a sensible size."""
        try:
            with ThreadPoolExecutor(1, "mps-command") as thread:  # one that ends: its confinement cannot be undone
                return thread.submit(self._ask, arguments, given).result()
        except RuntimeError as error:  # no thread can be made: too many, or this program is ending
            raise MpsError(f"MPS is left alone: {error}") from error

    def _ask(self, arguments: Sequence[str], given: str) -> Answer:
        with self._directory() as directory:
            confine(directory)
            process = self._start(arguments, directory)
            try:
                text = self._converse(process, given.encode())
                return Answer(process.returncode == 0, text)
            finally:
                _end(process)

    @contextmanager
    def _directory(self) -> Iterator[int]:
        """The daemon's, as it finds it."""
        daemon, where = self.daemon, printable(self.daemon.pipe_directory, 160)
        try:
            with self.proc.root_of(daemon.process) as root:
                found = foreign.find(root, daemon.pipe_directory, os.O_DIRECTORY)
        except GoneError as error:
            raise MpsError(f"Cannot find MPS control daemon process {daemon.process.tgid}: {error}") from error
        except SetupError as error:
            raise MpsError(f"MPS is left alone: {error}") from error
        except OSError as error:
            raise MpsError(f"{where} of the MPS control daemon {daemon.process.tgid}: {error.strerror}") from error
        try:
            yield found
        finally:
            os.close(found)

    def _start(self, arguments: Sequence[str], directory: int) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [self.daemon.program, *arguments],
                env=_environment(f"/proc/self/fd/{directory}"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(directory,),
            )
        except OSError as error:
            raise MpsError(f"{self.daemon.program} cannot be run ({error.strerror}): MPS is left alone") from error

    def _converse(self, process: subprocess.Popen[bytes], given: bytes) -> str:
        ends = time.monotonic() + self.patience_seconds
        assert process.stdin
        assert process.stdout
        with suppress(OSError):  # it may have ended without reading: its answer says why
            process.stdin.write(given)  # far less than a pipe holds
            process.stdin.close()
        output = self._read(process.stdout.fileno(), ends)
        try:
            process.wait(max(0.0, ends - time.monotonic()))
        except subprocess.TimeoutExpired as error:
            raise self._late() from error
        return output.decode("utf-8", "replace")

    def _read(self, descriptor: int, ends: float) -> bytes:
        output = bytearray()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while True:
                left = ends - time.monotonic()
                if left <= 0:
                    raise self._late()
                if not selector.select(left):
                    continue
                chunk = os.read(descriptor, 1 << 16)
                if not chunk:
                    return bytes(output)
                output += chunk
                if len(output) > MOST_BYTES:
                    raise MpsError(f"{self.daemon.program} answers without end: MPS is left alone")

    def _late(self) -> MpsTimeoutError:
        where, seconds = printable(self.daemon.pipe_directory, 160), self.patience_seconds
        return MpsTimeoutError(f"the MPS control daemon at {where} did not answer in {seconds:g} s: restart it")


def _environment(pipe_directory: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "CUDA_MPS_PROTOCOL_VERSION"}
    return {**kept, "CUDA_MPS_PIPE_DIRECTORY": pipe_directory, "LC_ALL": "C"}


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    for stream in (process.stdin, process.stdout):
        if stream:
            with suppress(OSError):
                stream.close()
    with suppress(subprocess.TimeoutExpired):  # in the kernel, for a disk perhaps: reaped when the next one is made
        process.wait(_REAP_SECONDS)
