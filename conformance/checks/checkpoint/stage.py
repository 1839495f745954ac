# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Who acts and who is acted on: a program that makes the calls, and one that holds memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from conformance.clients import launcher
from conformance.clients.launcher import Client
from conformance.host import Host
from conformance.report.model import Figure, Row, Verdict

NAME: Final = "checkpoint"
CALL_SECONDS: Final = 10.0
_NO_MPS: Final = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent/gpuwarden"}  # with a daemon's pipe it would be its client


class RefusedError(Exception):
    """A call or command failed where it had to succeed."""


@dataclass(frozen=True, slots=True)
class Stage:
    """The machine, and how much memory is saved."""

    host: Host

    @property
    def saved_bytes(self) -> int:
        """Where that is what is measured: 1 GiB, or 64 MiB where things only have to work."""
        return 1 << 26 if self.host.quick else 1 << 30

    @property
    def less_bytes(self) -> int:
        """Where it only has to take a while: making and saving 1 GiB takes too long to do it often."""
        return min(self.saved_bytes, 1 << 28)

    @contextmanager
    def holder(self, size: int, *options: str, extra: Mapping[str, str] | None = None) -> Iterator[Client]:
        """A program with so much device memory. Unavailable when it cannot have it."""
        command = launcher.own(self.host, "holder", "--bytes", str(size), *options)
        made = launcher.start(self.host, command, {**launcher.importing(), **(extra or {})})
        try:
            yield made
        finally:
            made.end()

    @contextmanager
    def calls(self) -> Iterator[Client]:
        """The program that calls the driver. Unavailable when the driver has no such calls."""
        command = launcher.module("conformance.checks.checkpoint.calls", launcher.library(self.host))
        made = launcher.start(self.host, command, {**launcher.importing(), **_NO_MPS})
        try:
            yield made
        finally:
            made.end()


def must_call(calls: Client, command: str, seconds: float = CALL_SECONDS) -> dict[str, Any]:
    """A call that has to succeed. RefusedError, SilenceError."""
    answer = calls.ask(command, seconds)
    if answer["code"]:
        raise RefusedError(f"{command.split()[0]}: {answer['message']}")
    return answer


def must_do(holder: Client, command: str, seconds: float = CALL_SECONDS) -> dict[str, Any]:
    """A command that has to succeed. RefusedError, SilenceError."""
    answer = holder.ask(command, seconds)
    if "error" in answer:
        raise RefusedError(f"{command.split()[0]}: {answer['error']}")
    return answer


def row(what: str, verdict: Verdict, figure: Figure, unit: str = "", baseline: Figure = None, note: str = "") -> Row:
    """A row of this item."""
    return Row(item=NAME, what=what, verdict=verdict, figure=figure, unit=unit, baseline=baseline, note=note)
