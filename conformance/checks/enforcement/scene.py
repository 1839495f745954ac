# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""One pair of the item enforcement on its stage: what was measured of it so far, its part of the time, its rows."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from agent.core.errors import WardenError
from bench.enforcement.modes import Mode
from conformance.checks.enforcement.pairs import LOAD_RATIO, Pair
from conformance.checks.enforcement.phases import Arrivals, Phase, Times, service_seconds
from conformance.checks.enforcement.shares import P99, AloneFigures, Figure, figures
from conformance.clients.online import Batch, Service
from conformance.host import Host
from conformance.report.model import Row, Verdict, failed, skipped
from tools.harness.arrivals import poisson
from tools.harness.stage import GpuNode, Stage

ITEM: Final = "enforcement"
EXPECTED_ERRORS: Final = (WardenError, OSError, ValueError, LookupError, subprocess.SubprocessError)
NO_TIME: Final = "no time was left for it"
_SEED: Final = 1
_LONGEST_SETTLE_SECONDS: Final = 20.0


@dataclass(slots=True)
class Scene:
    """`plain` and `law`: the phases without and with a law, which measure for the same time, as the rate asks for."""

    host: Host
    stage: Stage[GpuNode]
    pair: Pair
    plain: Times
    law: Times
    longest: float  # seconds that are measured, however seldom requests come
    deadline: float  # by time.monotonic()
    start_seconds: float = 0.0  # what it took to start both sides
    size: int | None = None  # that the offline side chose, if it chooses one
    alone: AloneFigures | None = None
    p99_ratios: dict[str, float] = field(default_factory=dict)  # of modes that had enough requests
    _arrivals: Arrivals | None = None
    _sides: int = 0

    @property
    def folder(self) -> Path:
        """This pair's."""
        return self.host.folder / self.pair.name.replace(" ", "-")

    def left(self) -> float:
        """Seconds of its part of the time."""
        return self.deadline - time.monotonic()

    def sides(self, online: Mapping[str, str] | None = None, offline: Mapping[str, str] | None = None) -> _Both:
        """Both sides, not started, with this in their environments."""
        self._sides += 1
        folder = self.folder / str(self._sides)
        folder.mkdir(parents=True)
        return (
            Service(self.host, self.stage, self.pair.online, folder, online or {}),
            Batch(
                self.host, self.stage, replace(self.pair.offline, words=self._offline_words()), folder, offline or {}
            ),
        )

    def _offline_words(self) -> tuple[str, ...]:
        """What it chose by itself at first, it does each time: else its steps could not be compared."""
        chosen = ("--size", str(self.size), "--kernel-ms", "0") if self.size else ()
        return (*self.pair.offline.words, *chosen)

    def cost(self, times: Times) -> float:
        """Seconds that a phase takes; our own programs are started for each."""
        return times.whole + (0.0 if self.pair.torch else 2 * self.start_seconds)

    def arrivals(self, service: Service) -> Arrivals:
        """Poisson, from a fixed seed, the same in each phase. At first the service is to be prepared, and alone."""
        if self._arrivals is None:
            rate = self.pair.rate_per_second or LOAD_RATIO / service_seconds(service)
            self.plain, self.law = (times.fitting(rate, self.longest) for times in (self.plain, self.law))
            settling = poisson(rate, _LONGEST_SETTLE_SECONDS, _SEED + 1)
            self._arrivals = Arrivals(settling, poisson(rate, self.plain.measured, _SEED))
        return self._arrivals

    def mode_rows(self, mode: Mode, phase: Phase) -> Iterator[Row]:
        """Rows of what a mode gave to either side."""
        assert self.alone
        for figure in figures(mode, phase, self.alone):
            if figure.measure == P99 and phase.telling:
                self.p99_ratios[mode.name] = figure.ratio
            yield self.row(f"{mode.name}: {figure.measure}", figure, "ratio")

    def row(self, what: str, figure: Figure, unit: str) -> Row:
        """About this pair."""
        return Row(
            item=ITEM,
            what=f"{self.pair.name}: {what}",
            verdict=figure.verdict,
            figure=round(figure.ratio, 4),
            unit=unit,
            baseline=None if figure.baseline is None else round(figure.baseline, 4),
            note=figure.note,
        )

    def measured(self, what: str, value: float, unit: str, note: str = "") -> Row:
        """A figure of which nothing was expected."""
        return self.row(what, Figure(what, value, Verdict.MEASURED, None, note), unit)

    def without(self, modes: Iterable[Mode], why: str) -> Iterator[Row]:
        """Modes that are not to be had."""
        for mode in modes:
            yield skipped(ITEM, f"{self.pair.name}: {mode.name}: {P99}", why)

    def broken(self, modes: Iterable[Mode], error: Exception) -> Iterator[Row]:
        """Modes that failed."""
        for mode in modes:
            yield failed(ITEM, f"{self.pair.name}: {mode.name}: {P99}", reason(error))


_Both = tuple[Service, Batch]


def reason(error: Exception) -> str:
    """The error's text in one line."""
    return " ".join(str(error).split())[-400:] or type(error).__name__
