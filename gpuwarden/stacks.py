# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The command: choose, sample, name, write."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path

from agent import cgroup_namespace, doors, endpoint, preflight
from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.errors import SetupError, UsageError, WardenError
from agent.model import Container
from agent.procfs import Procfs
from agent.stacks import flamegraph
from agent.stacks.arguments import MOST_SAMPLES
from agent.stacks.aside import Bcc
from agent.stacks.frames import Frames
from agent.stacks.report import Report, as_json, folded, merge
from agent.stacks.sampler import Kind, Sampler, Stack
from agent.stacks.target import Target

_ROUND_SECONDS = 0.25
_LOOK_ROUNDS = 4


def run(options: argparse.Namespace) -> int:
    """Looks for so many seconds, or until Ctrl-C, and writes what it saw."""
    _refuse(options)
    preflight.require_this_machine()
    cgroup_namespace.join_the_nodes()
    with ExitStack() as stack:
        bcc = None if options.no_symbols else stack.enter_context(closing(Bcc()))
        report = _look(options, Procfs(), bcc)
        if bcc is not None and bcc.trouble is not None:
            print(f"note: {bcc.trouble}", file=sys.stderr)
    _write(report, options)
    return 0


def _look(options: argparse.Namespace, proc: Procfs, bcc: Bcc | None) -> Report:
    target = Target(proc, _known_to_the_agent(options.socket or doors.place()))
    container = target.find(options.container)
    kind = Kind(options.kind)
    with Sampler(preflight.bpf_object().with_name("stacks.bpf.o"), proc, kind) as sampler:
        return _Looking(sampler, target, container, kind, Frames(proc, bcc)).look(options.seconds, options.every)


def _known_to_the_agent(socket: Path) -> Iterable[Container]:
    """Empty where no agent runs, or none that answers us: ids will do then."""
    try:
        snapshot = endpoint.fetch(socket, timeout=1.0)
    except WardenError:
        return ()
    return [used.container for used in snapshot.containers] if snapshot else ()


def _refuse(options: argparse.Namespace) -> None:
    if not 0.1 <= options.seconds <= 3600:
        raise UsageError(f"--seconds {options.seconds}: give seconds between 0.1 and 3600")
    if options.every is not None and not 1 <= options.every <= 1_000_000:
        raise UsageError(f"--every {options.every}: give a number between 1 and 1000000")


class _Looking:
    """One look at one container; stacks get their names while their process is there to be asked."""

    def __init__(self, sampler: Sampler, target: Target, container: Container, kind: Kind, frames: Frames) -> None:
        self._sampler, self._target, self._container = sampler, target, container
        self._kind, self._frames = kind, frames
        self._named: dict[Stack, tuple[str, ...]] = {}

    def look(self, seconds: float, every: int | None) -> Report:
        began = monotonic_ns()
        end_ns = began + int(seconds * NS_PER_SECOND)
        self._sampler.draw_every(every or 1)
        try:
            self._rounds(end_ns, adapt=every is None)
        except KeyboardInterrupt:
            print("ending early", file=sys.stderr)
        values = self._values()
        self._name(values)
        took = (monotonic_ns() - began) / NS_PER_SECOND
        stacks = merge((self._named[stack], value) for stack, value in values.items())
        return Report(self._container.name, self._kind.value, took, stacks, self._sampler.tallies())

    def _rounds(self, end_ns: int, *, adapt: bool) -> None:
        resting, number, seen = threading.Event(), 0, 0
        while (left := end_ns - monotonic_ns()) > 0:
            if number % _LOOK_ROUNDS == 0:
                self._sampler.follow(self._target.processes(self._container.key))
                self._frames.see(self._sampler.tgids())
                self._name(self._values())
            if number == 0:
                print(f"looking at {self._container.name}; Ctrl-C ends it early", file=sys.stderr, flush=True)
            resting.wait(min(_ROUND_SECONDS, left / NS_PER_SECOND))
            now_seen = self._sampler.tallies()["seen"]
            if adapt:
                self._sampler.draw_every(drawn(now_seen - seen))
            number, seen = number + 1, now_seen

    def _values(self) -> dict[Stack, int]:
        return self._sampler.launches() if self._kind is Kind.LAUNCH else self._sampler.live_bytes()

    def _name(self, values: dict[Stack, int]) -> None:
        self._frames.renew()
        for stack in values.keys() - self._named.keys():
            self._named[stack] = self._frames.stack(stack[0], self._sampler.addresses(stack))


def drawn(launches: int) -> int:
    """Of so many launches in a round, every how many to record."""
    return max(1, round(launches / (MOST_SAMPLES * _ROUND_SECONDS)))


def _write(report: Report, options: argparse.Namespace) -> None:
    print(report.headline, *(f"note: {note}" for note in report.notes()), sep="\n", file=sys.stderr)
    if options.out is not None:
        try:
            options.out.write_text(flamegraph.draw(report), encoding="utf-8")
        except OSError as error:
            raise SetupError(f"cannot write {options.out}: {error.strerror}") from error
    if options.json:
        print(as_json(report), end="")
    elif options.out is None:
        print(folded(report), end="")
