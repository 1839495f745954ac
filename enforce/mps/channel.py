# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One command to nvidia-cuda-mps-control, in bounded time and with a bounded answer.

A control daemon that hangs keeps its command program waiting for ever, so that is ended, and only that. The program
follows the protocol of the daemon that runs, whatever it is told itself.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

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

    def ask(self, arguments: Sequence[str] = (), given: str = "") -> Answer:
        """Runs the program. MpsError when there is no answer at all, in time or of a sensible size."""
        try:
            process = subprocess.Popen(
                [self.daemon.program, *arguments],
                env=_environment(self.daemon.pipe_directory),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise MpsError(f"{self.daemon.program} cannot be run ({error.strerror}): MPS is left alone") from error
        try:
            text = self._converse(process, given.encode())
            return Answer(process.returncode == 0, text)
        finally:
            _end(process)

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
        where, seconds = self.daemon.pipe_directory, self.patience_seconds
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
