# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The pictures of the convergence bench: latency above, then the bound of the queue, then the share; one time axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_WINDOW_S: Final = 1.0
_STEP_S: Final = 0.1
_LEAST: Final = 20  # requests in a window, before its p99 says anything


@dataclass(frozen=True, slots=True)
class Course:
    """What happened. Times are seconds since the online side's start."""

    title: str
    target_ms: float
    requests: tuple[tuple[float, float, float], ...]  # end, latency from arrival in ms, time of service in ms
    decisions: tuple[tuple[float, float, float], ...]  # when, max_queued in ms, share
    marks: tuple[tuple[float, str], ...]
    held_until_s: float  # when the last offline workload ended
    ends_s: float


def rolling_p99(values: Sequence[tuple[float, float]], ends_s: float) -> list[tuple[float, float]]:
    """The p99 of the second before each tenth of a second, where it holds enough. `values`: (when, what)."""
    out = []
    for tick in range(1, int(ends_s / _STEP_S) + 1):
        at = tick * _STEP_S
        recent = sorted(value for when, value in values if at - _WINDOW_S < when <= at)
        if len(recent) >= _LEAST:
            out.append((at, recent[math.ceil(0.99 * len(recent)) - 1]))
    return out


def plot(course: Course, path: Path) -> None:
    """Writes a PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 1, sharex=True, figsize=(11, 8), height_ratios=(3, 1.3, 1.3))
    _latency(axes[0], course)
    for axis, column, label in ((axes[1], 1, "max_queued (ms)"), (axes[2], 2, "share")):
        times = [decision[0] for decision in course.decisions]
        axis.step([*times, course.held_until_s], _held(course, column), where="post", color="tab:blue")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
    axes[2].set_ylim(0, 1.05)
    axes[2].set_xlabel("seconds")
    for axis in axes:
        axis.grid(alpha=0.3)
        for at, _ in course.marks:
            axis.axvline(at, color="black", linewidth=0.8, linestyle=":")
    figure.suptitle(course.title, fontsize=11)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    pyplot.close(figure)


def _latency(axis: Any, course: Course) -> None:
    served = [(end, service) for end, _, service in course.requests]
    arrived = [(end, latency) for end, latency, _ in course.requests]
    axis.plot(*zip(*served, strict=True), ".", markersize=2, alpha=0.3, color="tab:gray", label="GPU time of a request")
    for values, colour, label in (
        (served, "tab:blue", "its p99 over 1 s: what the law reads"),
        (arrived, "tab:orange", "p99 over 1 s from the arrival, queueing included"),
    ):
        found = rolling_p99(values, course.ends_s)
        axis.plot([at for at, _ in found], [value for _, value in found], color=colour, label=label)
    axis.axhline(course.target_ms, color="tab:red", linestyle="--", label=f"target {course.target_ms:.2f} ms")
    axis.set_ylabel("latency (ms)")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:g}"[0] in "235" else "")
    for at, text in course.marks:
        axis.text(at, 1.0, f" {text}", transform=axis.get_xaxis_transform(), va="top", fontsize=9)
    axis.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=4, fontsize=8, frameon=False)


def _held(course: Course, column: int) -> list[float]:
    values = [decision[column] for decision in course.decisions]
    return [*values, *values[-1:]]
