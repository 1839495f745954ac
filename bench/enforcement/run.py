# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One pair of the enforcement bench through all modes: alone, without the agent, with it, and alone again.

The agent exists only while a law is measured and while the signal is read that the targets are made from; what is
measured alone, and under plain sharing, is measured without a probe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.core.errors import PolicyError, SetupError
from bench.enforcement.agent import Agent, Promise, agent
from bench.enforcement.figures import Baseline, Phase, middle, row_of, unavailable
from bench.enforcement.modes import ALONE, Mode, offline_percentage
from bench.enforcement.pairs import Pair
from bench.enforcement.phase import Load, measure
from tools.harness import agents
from tools.harness.arrivals import fitted, following, poisson, read_trace
from tools.harness.node import Node, simulated_node
from tools.harness.quiet import STOLEN_RATIO
from tools.harness.stage import Cpus, Stage, open_stage

_ALONE_SETTLE_SECONDS: Final = 1.0
_OFFLINE_SECONDS: Final = 4.0
_LONGEST_SETTLE_SECONDS: Final = 60.0
_TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class Settings:
    """What all pairs have in common. `seconds` is what is measured of each phase."""

    seconds: float
    signal: str
    trace: Path
    seed: int
    isolated: bool
    pin: bool


@dataclass(frozen=True, slots=True)
class Runner:
    """A pair on its stage."""

    pair: Pair
    settings: Settings
    stage: Stage[Node]
    settling: Sequence[float]
    measured: Sequence[float]
    port: int

    @property
    def seconds(self) -> float:
        return self.settings.seconds * self.pair.stretch

    def alone(self, read: Callable[[], float | None] = lambda: None) -> Phase:
        """Measures the online side by itself."""
        return self._measure((), {}, _ALONE_SETTLE_SECONDS, read)

    def offline_alone(self) -> float:
        """The offline side's SM time by itself, of the device's."""
        load = Load((), self.pair.offline)
        return measure(self.stage, load, _ALONE_SETTLE_SECONDS, min(_OFFLINE_SECONDS, self.seconds)).offline_sm_ratio

    def beside(self, mode: Mode, online_sm_ratio: float) -> Phase:
        """Measures both in this mode, with MPS where the mode needs it."""
        extra = {"CUDA_MPS_CLIENT_PRIORITY": "1"} if mode.priority else {}
        if mode.percentage:
            extra["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(offline_percentage(online_sm_ratio))
        with self.stage.node.mps_daemon() if mode.mps else nullcontext():
            return self._measure(self.pair.offline, extra, mode.settle_seconds)

    def promise(self, mode: Mode | None, signal_ns: float) -> Promise:
        """The policy of a mode; without one, it only observes."""
        target_ns = signal_ns * (mode.target_ratio if mode else 1.0)
        law = mode.law if mode and mode.law else "headroom"
        return Promise(law, self.settings.signal, self.port, target_ns, self.seconds)

    def _measure(
        self,
        offline: Sequence[Sequence[str]],
        extra: Mapping[str, str],
        settle_seconds: float,
        read: Callable[[], float | None] = lambda: None,
    ) -> Phase:
        signal = self.settings.signal
        port = None if signal == "gpu_wait" else self.port
        load = Load(self.pair.online, offline, self.settling, self.measured, extra, port, signal == "http")
        return middle([self._least_stolen(load, settle_seconds, read) for _ in range(self.pair.rounds)])

    def _least_stolen(self, load: Load, settle_seconds: float, read: Callable[[], float | None]) -> Phase:
        phase = measure(self.stage, load, settle_seconds, self.seconds, read)
        if (phase.stolen_ratio or 0.0) <= STOLEN_RATIO:
            return phase
        again = measure(self.stage, load, settle_seconds, self.seconds, read)
        return min(phase, again, key=lambda one: one.stolen_ratio or 0.0)


@contextmanager
def runner(pair: Pair, settings: Settings, folder: Path) -> Iterator[Runner]:
    """A runner with a simulated GPU of its own."""
    cpus = Cpus.split(settings.pin)
    folder.mkdir(parents=True)
    with simulated_node(folder / "gpu") as node, open_stage(node, folder, cpus) as stage:
        cpus.bind(node.server_tgid, online=True)
        yield Runner(pair, settings, stage, *arrivals_of(pair, settings), agents.free_port())


def arrivals_of(pair: Pair, settings: Settings) -> tuple[list[float], list[float]]:
    """Of each phase: while everything settles, of which a phase takes as much as it needs, and what is measured."""
    seconds, rate = settings.seconds * pair.stretch, pair.rate_per_second
    if pair.trace:
        trace = read_trace(settings.trace)
        return following(trace, rate, seconds, _LONGEST_SETTLE_SECONDS), fitted(trace, rate, seconds)
    return poisson(rate, _LONGEST_SETTLE_SECONDS, settings.seed + 1), poisson(rate, seconds, settings.seed)


def run_pair(
    pair: Pair, modes: Sequence[Mode], settings: Settings, folder: Path, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measures a pair; a row for each mode, in their order."""
    phases: dict[str, Phase] = {}
    refused: dict[str, str] = {}
    with runner(pair, settings, folder) as run:
        first = run.alone()
        say(f"{pair.name}: alone: p99 {first.quantile_s(0.99) * 1e3:.2f} ms, SMs {first.online_sm_ratio:.2f}")
        offline_alone = run.offline_alone()
        for mode in modes:
            if mode.law is None and mode.name != ALONE:
                phases[mode.name] = run.beside(mode, first.online_sm_ratio)
                say(_line(pair, mode, phases[mode.name], first))
        watched = _with_laws(run, [mode for mode in modes if mode.law], first, phases, refused, say)
        baseline = Baseline(first, run.alone(), offline_alone, watched)
        say(f"{pair.name}: alone again: p99 {baseline.second.quantile_s(0.99) * 1e3:.2f} ms")
    phases[ALONE] = baseline.both
    return [
        unavailable(pair.name, mode.name, refused[mode.name])
        if mode.name in refused
        else row_of(pair.name, mode, phases[mode.name], baseline)
        for mode in modes
    ]


def _with_laws(
    run: Runner,
    modes: Sequence[Mode],
    alone: Phase,
    phases: dict[str, Phase],
    refused: dict[str, str],
    say: Callable[[str], None],
) -> tuple[Phase, ...]:
    """What needs the agent. It only watches first and at the end, and that is returned.

    A mode that it refuses costs no other.
    """
    watched: list[Phase] = []
    if not modes:
        return ()
    try:
        with agent(run.stage, run.promise(None, 1e9), isolated=run.settings.isolated) as warden:
            first, signal_ns = _signal_alone(run, warden, say)
            watched.append(first)
            for mode in modes:
                reason = warden.take(run.promise(mode, signal_ns))
                if reason:
                    refused[mode.name] = reason
                    say(f"{run.pair.name}: {mode.name}: not available: {reason}")
                    continue
                phases[mode.name] = run.beside(mode, alone.online_sm_ratio)
                say(_line(run.pair, mode, phases[mode.name], alone))
                warden.take(run.promise(None, signal_ns), enforce=False)
            watched.append(run.alone())
            say(f"{run.pair.name}: alone, watched: p99 {watched[-1].quantile_s(0.99) * 1e3:.2f} ms")
    except PolicyError as error:
        refused.update((mode.name, str(error)) for mode in modes if mode.name not in phases)
        say(f"{run.pair.name}: no mode with a law is available: {error}")
    return tuple(watched)


def _signal_alone(run: Runner, warden: Agent, say: Callable[[str], None]) -> tuple[Phase, float]:
    """The online side alone, and its p99 as the signal reads it: what the targets are multiples of."""
    for _ in range(_TRIES):  # where the machine stalls, a short phase may be over before the agent knows the container
        watched = run.alone(warden.latency_ns)
        if watched.signal_ns is not None:
            p99_ms, signal_ms = watched.quantile_s(0.99) * 1e3, watched.signal_ns / 1e6
            say(f"{run.pair.name}: alone, watched: p99 {p99_ms:.2f} ms, by the signal {signal_ms:.2f} ms")
            return watched, watched.signal_ns
    raise SetupError(f"{run.pair.name}: the signal {run.settings.signal} reads nothing: give more --seconds")


def _line(pair: Pair, mode: Mode, phase: Phase, alone: Phase) -> str:
    p99, p50 = (phase.quantile_s(q) / alone.quantile_s(q) for q in (0.99, 0.5))
    stolen = "" if phase.stolen_ratio is None else f", stolen {phase.stolen_ratio:.1%}"
    return f"{pair.name}: {mode.name}: p99 {p99:.2f}×, p50 {p50:.2f}×, offline SMs {phase.offline_sm_ratio:.2f}{stolen}"
