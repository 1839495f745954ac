# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""SM time per launch of each function, by non-negative least squares of the device's activity on launch counts.

The device says how much SM time was used in a tick, the probes say what was launched in it. Over many ticks that
determines the functions' SM time, as long as their mix varies. Where it does not, a prior decides: what the process's
own waits say (agent/delivery.py), or the last value. Solved by coordinate descent: a handful of unknowns, 60 ticks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from agent.model import ProcessId

Function = tuple[ProcessId, int]  # a process and a CUfunction in it
_TICKS = 60
_SWEEPS = 60
_MOST_UNKNOWNS = 64
_PRIOR_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Tick:
    """One tick of one device: SM time used (ns of the whole device) and launches per function."""

    sm_ns: float
    launches: Mapping[Function, int]


@dataclass(slots=True)
class SmTimes:
    """What is believed about one device's functions. `observe` learns, `sm_ns` answers."""

    _ticks: deque[Tick] = field(default_factory=lambda: deque(maxlen=_TICKS))
    _values: dict[Function, float] = field(default_factory=dict)

    def observe(self, tick: Tick, priors: Mapping[Function, float]) -> None:
        """Takes a tick in and solves again. `priors`: SM ns per launch where something else tells."""
        self._ticks.append(tick)
        counts: dict[Function, int] = {}
        for past in self._ticks:
            for function, launches in past.launches.items():
                counts[function] = counts.get(function, 0) + launches
        unknowns = sorted(counts, key=lambda function: -counts[function])[:_MOST_UNKNOWNS]
        starts = {f: self._values.get(f, priors.get(f, 0.0)) for f in unknowns}
        anchors = {f: priors.get(f, starts[f]) for f in unknowns}
        self._values = solve(tuple(self._ticks), starts, anchors)

    def sm_ns(self, function: Function) -> float | None:
        """SM time per launch as a share of the whole device; None when never seen."""
        return self._values.get(function)

    def forget(self, process: ProcessId) -> None:
        """The process is gone; its ticks age out by themselves."""
        for function in [f for f in self._values if f[0] == process]:
            del self._values[function]


def solve(
    ticks: tuple[Tick, ...], starts: Mapping[Function, float], anchors: Mapping[Function, float]
) -> dict[Function, float]:
    """argmin over x ≥ 0 of Σ_t (sm_t − Σ_f n_tf·x_f)² + Σ_f w·Σ_t n_tf²·(x_f − anchor_f)², in ns per launch."""
    values = dict(starts)
    columns = {f: [tick.launches.get(f, 0) for tick in ticks] for f in values}
    residual = [
        tick.sm_ns - sum(columns[f][row] * value for f, value in values.items()) for row, tick in enumerate(ticks)
    ]
    for _ in range(_SWEEPS):
        for function, column in columns.items():
            square = sum(n * n for n in column)
            if not square:
                continue
            pull = sum(n * r for n, r in zip(column, residual, strict=True)) + square * values[function]
            weight = _PRIOR_WEIGHT * square
            new = max(0.0, (pull + weight * anchors[function]) / (square + weight))
            change = new - values[function]
            if change:
                residual = [r - n * change for n, r in zip(column, residual, strict=True)]
                values[function] = new
    return values
