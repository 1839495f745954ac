# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Durations of functions by program: short jobs come and go, and what is learned from one goes for the next.

Function handles differ from process to process, so a function is known again by the shape of its grid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from agent.function_times import OTHER, FunctionTimes
from agent.model import ProcessId
from agent.samples import Delivered
from agent.tally import Launched

_UP: Final = 0.015  # they are many: there is time to find the lower edge of all their deliveries
_MOST_PROGRAMS: Final = 256


def shape_of(one: Launched) -> int:
    """Never OTHER."""
    return hash((one.blocks // max(1, one.launches), one.threads_per_block)) or -1


@dataclass(slots=True)
class ProgramTimes:
    """Of one device. The program used longest ago is forgotten first."""

    _times: FunctionTimes = field(default_factory=lambda: FunctionTimes(_UP))
    _used: dict[str, None] = field(default_factory=dict)

    def observe(
        self,
        deliveries: Iterable[Delivered],
        programs: Mapping[ProcessId, str],
        work: Mapping[ProcessId, Mapping[int, Launched]],
    ) -> None:
        """Takes the deliveries of a tick in, beside what was launched in it."""
        for delivery in deliveries:
            program, launched = programs.get(delivery.process), work.get(delivery.process, {})
            if program is None or not launched:
                continue
            self._used.pop(program, None)
            self._used[program] = None
            shapes = {function: shape_of(one) for function, one in launched.items()}
            functions = tuple((shapes.get(function, OTHER), count) for function, count in delivery.functions)
            self._times.observe(program, replace(delivery, functions=functions))
        while len(self._used) > _MOST_PROGRAMS:
            oldest = next(iter(self._used))
            del self._used[oldest]
            self._times.forget([oldest])

    def per_launch_ns(self, program: str, one: Launched) -> float | None:
        """None before the program's first delivery."""
        return self._times.per_launch_ns(program, shape_of(one))

    def waited_ns(self, program: str) -> float | None:
        """As FunctionTimes."""
        return self._times.waited_ns(program)
