# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The same pairs and the same smallest things on a real GPU and on the simulated one, whose figures are the baseline.

`python -m conformance --simulated --only calibration`, then `python -m conformance.checks.calibration
gpu-report/report.json`, writes baselines down. A figure within FACTOR of its own is as was assumed;
bench/calibration/__main__.py compares with published ones.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Final

from bench.enforcement.figures import nearest_rank
from bench.enforcement.pairs import PAIRS
from conformance.checks.enforcement.constants import CONSTANTS, constants
from conformance.checks.enforcement.phases import Arrivals, Phase, Times, few, play
from conformance.checks.enforcement.scene import EXPECTED_ERRORS, NO_TIME, reason
from conformance.checks.enforcement.shares import believed, within
from conformance.checks.enforcement.stages import bare
from conformance.clients.online import Batch, Program, Service
from conformance.host import Host, Unavailable
from conformance.report.baseline import PLACE, Recorded, text_of
from conformance.report.model import Row, Verdict, failed, skipped
from tools.harness.arrivals import poisson
from tools.harness.stage import GpuNode, Stage
from tools.harness.workloads import RESNET_LIKE, WHISPER_LIKE

TITLE: Final = "calibration of the simulated GPU"
SECONDS: Final = 60
LEAST_SECONDS: Final = 28
ITEM: Final = "calibration"
FACTOR: Final = 1.5
MEAN: Final = "mean to alone"
P99: Final = "p99 to alone"


@dataclass(frozen=True, slots=True)
class Case:
    """A pair of our workloads. `share`: the environment of an offline MPS client; None: without MPS."""

    name: str
    online: Program
    offline: Program
    rate_per_second: float
    share: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Stall:
    """What a short kernel waits for beside others: the 99th percentile is about the length of a turn."""

    what: str
    offline: Program


def _program(text: str | Sequence[str]) -> Program:
    return Program(tuple(shlex.split(text) if isinstance(text, str) else text))


_REQUEST: Final = "--kernels 20 --kernel-us 50 --blocks 284 --threads 1024"
_SERVICE: Final = _program(_REQUEST)
_COPYING: Final = _program(f"{_REQUEST} --copy-bytes 2MiB")
_SHORT: Final = _program(RESNET_LIKE)
_LONG: Final = _program(WHISPER_LIKE)
_COPIES: Final = _program(PAIRS["copies"].offline[0])
_ONE: Final = _program("--kernels 1 --kernel-us 50 --blocks 132 --threads 1024")
CASES: Final = (
    Case("time slicing, short kernels", _SERVICE, _SHORT, 250.0),
    Case("time slicing, long kernels", _SERVICE, _LONG, 250.0),
    Case("MPS", _SERVICE, _SHORT, 250.0, {}),
    Case("MPS, offline with below-normal priority", _SERVICE, _SHORT, 250.0, {"CUDA_MPS_CLIENT_PRIORITY": "1"}),
    Case("MPS, offline with 30 %", _SERVICE, _SHORT, 250.0, {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}),
    Case("copies and kernels beside copies and kernels", _COPYING, _COPIES, 250.0),
)
STALLS: Final = (
    Stall(
        "what a short kernel waits beside kernels of 10 ms", _program("--kernels 20 --kernel-us 10000 --threads 1024")
    ),
    Stall(
        "what a short kernel waits beside kernels of 100 µs", _program("--kernels 500 --kernel-us 100 --threads 1024")
    ),
)
_STALL_RATE: Final = 25.0  # so seldom that hardly any request waits for another
WHAT: Final = (
    *(constant.what for constant in CONSTANTS),
    *(stall.what for stall in STALLS),
    *(f"{case.name}: {measure}" for case in CASES for measure in (MEAN, P99)),
)
_SEED: Final = 1
_CLOSING_SECONDS: Final = 6.0
_STARTING_SECONDS: Final = 1.5


@dataclass(slots=True)
class Run:
    """The figures that are known so far."""

    host: Host
    stage: Stage[GpuNode]
    times: Times
    deadline: float
    recorded: Recorded = field(default_factory=Recorded.read)
    _alone: dict[tuple[Program, float], Phase] = field(default_factory=dict)
    _sides: int = 0

    def phase(
        self,
        online: Program,
        rate: float,
        offline: Program | None,
        clients: Mapping[str, str],
        share: Mapping[str, str],
    ) -> Phase:
        """One, with both sides started for it. `clients`: their environment; `share`: the offline one's beyond that."""
        self._sides += 1
        folder = self.host.folder / f"calibration-{self._sides}"
        folder.mkdir()
        service = Service(self.host, self.stage, online, folder, clients)
        batch = Batch(self.host, self.stage, offline, folder, {**clients, **share}) if offline else None
        service.measure()
        if batch:
            batch.measure()
        settling = poisson(rate, self.times.settle + 1, _SEED + 1)
        arrivals = Arrivals(settling, poisson(rate, self.times.measured, _SEED))
        try:
            return play(service, batch, arrivals, self.times)
        finally:
            service.end()
            if batch:
                batch.end()

    def alone(self, online: Program, rate: float) -> Phase:
        """The service by itself, without MPS; measured once."""
        if (online, rate) not in self._alone:
            self._alone[online, rate] = self.phase(online, rate, None, {}, {})
        return self._alone[online, rate]

    def has_time_for(self, online: Program, rate: float) -> bool:
        """Whether a phase of this service may be begun, and the one alone, if that is still to come."""
        phases = 1 if (online, rate) in self._alone else 2
        return time.monotonic() + phases * (self.times.whole + _STARTING_SECONDS) < self.deadline

    def row(self, what: str, figure: float, unit: str, note: str = "") -> Row:
        """A row with its baseline, where one is recorded."""
        baseline = self.recorded.figures.get(what)
        verdict = Verdict.MEASURED if baseline is None else within(figure, baseline, FACTOR)
        dated = "" if baseline is None else f"baseline: the simulated GPU, {self.recorded.date}"
        note = "; ".join(part for part in (note, dated) if part)
        return Row(
            item=ITEM, what=what, verdict=verdict, figure=round(figure, 4), unit=unit, baseline=baseline, note=note
        )


def rows(host: Host) -> Iterator[Row]:
    """The smallest things, then turns, then pairs."""
    times = Times(0.2, 0.8) if host.quick else Times(0.5, 2.5)
    with bare(host) as stage:
        run = Run(host, stage, times, time.monotonic() + min(SECONDS, host.seconds) - _CLOSING_SECONDS)
        try:
            for constant, figure in list(constants(host)):
                if figure is None:
                    yield skipped(ITEM, constant.what, "no end was found")
                else:
                    yield run.row(constant.what, figure, constant.unit, constant.note)
        except EXPECTED_ERRORS as error:
            yield failed(ITEM, CONSTANTS[0].what, reason(error))
        for stall in STALLS[:1] if host.quick else STALLS:
            yield from _guarded(run, stall.what, _stall_rows(run, stall))
        yield from _case_rows(run, CASES[:1] if host.quick else CASES)


def _guarded(run: Run, what: str, found: Iterator[Row]) -> Iterator[Row]:
    """Yields the rows; an error becomes one more row, and what it left is removed."""
    try:
        yield from found
    except EXPECTED_ERRORS as error:
        yield failed(ITEM, what, reason(error))
    finally:
        run.stage.end()


def _stall_rows(run: Run, stall: Stall) -> Iterator[Row]:
    if not run.has_time_for(_ONE, _STALL_RATE):
        yield skipped(ITEM, stall.what, NO_TIME)
        return
    alone = run.alone(_ONE, _STALL_RATE)
    phase = run.phase(_ONE, _STALL_RATE, stall.offline, {}, {})
    waited_ms = nearest_rank(phase.services_s, 0.99) * 1e3  # without what it waited for other short ones
    usual_ms = nearest_rank(alone.services_s, 0.5) * 1e3
    yield run.row(
        stall.what, waited_ms - usual_ms, "ms", f"99th percentile, less the {usual_ms:.3f} ms that it takes alone"
    )


def _case_rows(run: Run, cases: Sequence[Case]) -> Iterator[Row]:
    """Rows of the pairs: those without MPS first; one daemon for all others."""
    for case in cases:
        if case.share is None:
            yield from _guarded(run, f"{case.name}: {MEAN}", _pair_rows(run, case, {}))
    with_mps = [case for case in cases if case.share is not None]
    if not with_mps:
        return
    try:
        with run.host.mps() as clients:
            while with_mps:
                yield from _guarded(run, f"{with_mps[0].name}: {MEAN}", _pair_rows(run, with_mps[0], clients))
                with_mps.pop(0)
    except Unavailable as why:
        for case in with_mps:
            yield skipped(ITEM, f"{case.name}: {MEAN}", str(why))


def _pair_rows(run: Run, case: Case, clients: Mapping[str, str]) -> Iterator[Row]:
    if not run.has_time_for(case.online, case.rate_per_second):
        yield skipped(ITEM, f"{case.name}: {MEAN}", NO_TIME)
        return
    alone = run.alone(case.online, case.rate_per_second)
    phase = run.phase(case.online, case.rate_per_second, case.offline, clients, case.share or {})
    late = "the service fell behind, so this is a lower bound" if phase.overrun else ""
    yield run.row(f"{case.name}: {MEAN}", fmean(phase.latencies_s) / fmean(alone.latencies_s), "ratio", late)
    note = "; ".join(part for part in (few(len(phase.latencies_s)), late) if part)
    row = run.row(f"{case.name}: {P99}", phase.quantile_s(0.99) / alone.quantile_s(0.99), "ratio", note)
    yield replace(row, verdict=believed(row.verdict, phase, alone))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes a report's figures down as baselines."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance.checks.calibration", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("report", type=Path, help="report.json of a run on the simulated GPU")
    options = parser.parse_args(arguments)
    try:
        text = text_of(json.loads(options.report.read_text()), ITEM)
    except (OSError, ValueError, LookupError) as error:
        print(f"calibration: {error}", file=sys.stderr)
        return 1
    PLACE.write_text(text)
    print(f"calibration: wrote {PLACE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
