# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden stacks`: which code of a container launches or holds memory. Choose, sample, symbolize, write."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Final

from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SetupError, UsageError, WardenError
from agent.core.model import Container
from agent.exporters.api.client import HELP as SOCKET_HELP
from agent.exporters.api.client import fetch, place
from agent.node import cgroups, preflight
from agent.node.procfs import Procfs
from agent.probes.return_probes import why_off
from agent.stacks import output
from agent.stacks.output import StackReport, as_json, folded, merge
from agent.stacks.sampler import SampledContainer, SampleKind, Sampler, Stack
from agent.stacks.symbolizer import Bcc, Frames
from gpuwarden.options import add_return_probes

MOST_SAMPLES = 200  # per second: a stack costs the launching thread some microseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden stacks`."""
    parser.add_argument("--container", required=True, metavar="X", help="its name, id, key, pod or systemd unit")
    parser.add_argument("--kind", choices=("launch", "alloc"), default="launch", help="what to sample (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to look (%(default)s)")
    parser.add_argument(
        "--every", type=int, metavar="N", help=f"one launch in N, at random (as many as keep to {MOST_SAMPLES}/s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write a file instead of folded stacks on stdout: FILE.pb.gz for pprof and speedscope; FILE.folded or "
        "FILE.txt, folded stacks, for flamegraph.pl",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--socket", type=Path, help=f"{SOCKET_HELP}: it knows names")
    parser.add_argument("--no-symbols", action="store_true", help="modules and offsets; needs no bcc")
    add_return_probes(parser)


_PPROF: Final = ".pb.gz"
_FOLDED: Final = (".folded", ".txt")
_ROUND_SECONDS = 0.25
_LOOK_ROUNDS = 4


def act(options: argparse.Namespace) -> int:
    """Samples for so many seconds, or until Ctrl-C, and writes the stacks."""
    _refuse(options)
    preflight.require_this_machine()
    if options.kind == SampleKind.ALLOC and (why := why_off(options.return_probes)) is not None:
        raise SetupError(f"stacks of allocations need return probes, which are off: {why}; --kind launch works without")
    cgroups.join_node_namespace()
    with ExitStack() as stack:
        bcc = None if options.no_symbols else stack.enter_context(closing(Bcc()))
        report = _look(options, Procfs(), bcc)
        if bcc is not None and bcc.trouble is not None:
            print(f"note: {bcc.trouble}", file=sys.stderr)
    _write(report, options)
    return 0


def _look(options: argparse.Namespace, proc: Procfs, bcc: Bcc | None) -> StackReport:
    target = SampledContainer(proc, _named_by_agent(options.socket or place()))
    container = target.find(options.container)
    kind = SampleKind(options.kind)
    with Sampler(preflight.bpf_object().with_name("stacks.bpf.o"), proc, kind) as sampler:
        return _Run(sampler, target, container, kind, Frames(proc, bcc)).look(options.seconds, options.every)


def _named_by_agent(socket: Path) -> Iterable[Container]:
    """Containers with the agent's names; empty where no agent answers: ids are used then."""
    try:
        snapshot = fetch(socket, timeout=1.0)
    except WardenError:
        return ()
    return [used.container for used in snapshot.containers] if snapshot else ()


def _refuse(options: argparse.Namespace) -> None:
    if not 0.1 <= options.seconds <= 3600:
        raise UsageError(f"--seconds {options.seconds}: give seconds between 0.1 and 3600")
    if options.every is not None and not 1 <= options.every <= 1_000_000:
        raise UsageError(f"--every {options.every}: give a number between 1 and 1000000")
    if options.out is not None and not options.out.name.endswith((_PPROF, *_FOLDED)):
        raise UsageError(f"--out {options.out}: give FILE{_PPROF} for pprof, or FILE{' or FILE'.join(_FOLDED)}")


class _Run:
    """One run on one container; stacks are symbolized while their process still runs."""

    def __init__(
        self, sampler: Sampler, target: SampledContainer, container: Container, kind: SampleKind, frames: Frames
    ) -> None:
        self._sampler, self._target, self._container = sampler, target, container
        self._kind, self._frames = kind, frames
        self._named: dict[Stack, tuple[str, ...]] = {}

    def look(self, seconds: float, every: int | None) -> StackReport:
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
        tallies = self._sampler.tallies()
        return StackReport(self._container.name, self._kind.value, took, stacks, tallies, time.time_ns())

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
        return self._sampler.launches() if self._kind is SampleKind.LAUNCH else self._sampler.live_bytes()

    def _name(self, values: dict[Stack, int]) -> None:
        self._frames.renew()
        for stack in values.keys() - self._named.keys():
            self._named[stack] = self._frames.stack(stack[0], self._sampler.addresses(stack))


def drawn(launches: int) -> int:
    """The N of "one launch in N" that keeps to MOST_SAMPLES, for so many launches in a round."""
    return max(1, round(launches / (MOST_SAMPLES * _ROUND_SECONDS)))


def _write(report: StackReport, options: argparse.Namespace) -> None:
    print(report.headline, *(f"note: {note}" for note in report.notes()), sep="\n", file=sys.stderr)
    if options.out is not None:
        content = output.profile(report) if options.out.name.endswith(_PPROF) else folded(report).encode()
        try:
            options.out.write_bytes(content)
        except OSError as error:
            raise SetupError(f"cannot write {options.out}: {error.strerror}") from error
    if options.json:
        print(as_json(report), end="")
    elif options.out is None:
        print(folded(report), end="")
