# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""How the programs calls_*.py talk with their parent: a line in, a line of JSON out.

A program gets ready, with everything done once that is done only the first time, and says so. Then for each name of a
phase that it reads it does that phase, waits for the GPU, and says what it did.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

Phase = Callable[[], dict[str, int]]
"""Does something and says how often: launches, graph launches, copies, memsets, allocations, frees, waits."""


def own_stdout() -> Any:
    """Where answers go. Whatever else the program prints goes to its standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def serve(answers: Any, about: Mapping[str, object], phases: Mapping[str, Phase]) -> None:
    """Executes commands until standard input ends."""
    _say(answers, {"about": dict(about), "phases": list(phases)})
    for line in sys.stdin:
        try:
            answer: dict[str, object] = {"did": phases[line.strip()]()}
        except Exception as error:  # noqa: BLE001  # whatever a framework raises, the next phase may work
            answer = {"failed": f"{type(error).__name__}: {error}"[:300]}
        _say(answers, answer)


def _say(answers: Any, what: Mapping[str, object]) -> None:
    answers.write(json.dumps(what) + "\n")
    answers.flush()
