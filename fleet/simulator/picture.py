# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A picture of how completion and queueing times are distributed under each policy (cumulative, logarithmic time)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from fleet.model import FleetError
from fleet.simulator.outcome import Ended, Outcome

_LEAST_S: Final = 1.0  # a logarithmic axis has no 0: who waited less is drawn here
_PANELS: Final[tuple[tuple[str, Callable[[Ended], float]], ...]] = (
    ("job completion time (s)", lambda one: one.jct_s),
    ("queueing (s)", lambda one: one.queueing_s),
)


def cumulative(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Times, ascending, and the part of all that is at most as long; the first part is 0, so that a step is seen."""
    ordered = [max(_LEAST_S, value) for value in sorted(values)]
    return [_LEAST_S, *ordered], [place / max(1, len(ordered)) for place in range(len(ordered) + 1)]


def check() -> None:
    """FleetError: matplotlib is missing. Is called before what takes long."""
    if find_spec("matplotlib") is None:
        raise FleetError("--picture needs matplotlib: pip install 'gpuwarden[plots]'", 3)


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Writes a PNG. FleetError: matplotlib is missing, or the file cannot be written."""
    check()
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(_PANELS), sharey=True, figsize=(11, 4.5))
    for axis, (label, time_s) in zip(axes, _PANELS, strict=True):
        for outcome in outcomes:
            axis.step(*cumulative([time_s(one) for one in outcome.ended]), where="post", label=outcome.policy)
        _dress(axis, label)
    axes[0].set_ylabel("part of the jobs")
    axes[0].legend(loc="lower right")
    figure.tight_layout()
    try:
        figure.savefig(path, format="png", dpi=120)
    except OSError as error:
        raise FleetError(f"cannot write {path}: {error}") from error
    finally:
        pyplot.close(figure)


def _dress(axis: Any, label: str) -> None:
    axis.set_xscale("log")
    axis.set_ylim(0, 1)
    axis.set_xlabel(label)
    axis.grid(alpha=0.3)
