# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is looked at, one module each, in the order of a run. A module has TITLE, SECONDS, WHAT and `rows(host)`.

SECONDS is its limit. LEAST_SECONDS, most of it where the module does not say, is kept free for it while those before it
run. It begins when most of that is left, and the rows that come in time are kept; one that looks at less where it has
less keeps to `host.seconds`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from conformance.host import Host
from conformance.report.model import Row

_MODULES: Final = {
    "machine": "conformance.checks.machine",
    "exports": "conformance.checks.exports",
    "frameworks": "conformance.checks.frameworks",
    "probes": "conformance.checks.probes.item",
    "nvml": "conformance.checks.nvml.item",
    "attribution": "conformance.checks.attribution.item",
    "stopping": "conformance.checks.stopping.item",
    "checkpoint": "conformance.checks.checkpoint.item",
    "mps": "conformance.checks.mps.item",
    "enforcement": "conformance.checks.enforcement.item",
    "sharing": "conformance.checks.sharing",
    "calibration": "conformance.checks.calibration",
    "leftovers": "conformance.checks.leftovers",
}
ORDER: Final = tuple(_MODULES)


MOST: Final = 0.7


class Rows(Protocol):
    """Yields rows as they come, so that those before a time-out are kept. Raises Unavailable: the item is skipped."""

    def __call__(self, host: Host) -> Iterator[Row]: ...


@dataclass(frozen=True, slots=True)
class Item:
    """A module of this package."""

    name: str
    title: str
    seconds: float  # its limit on a real machine
    what: Sequence[str]  # the `what` of each row that it can yield; {…} stands for names that it finds
    rows: Rows
    least_seconds: float  # kept free for it


def item(name: str) -> Item:
    """KeyError for a name that is not in ORDER; ImportError and AttributeError where the module is not whole."""
    if name not in ORDER:
        raise KeyError(name)
    module = importlib.import_module(_MODULES[name])
    seconds = float(module.SECONDS)
    least = float(getattr(module, "LEAST_SECONDS", MOST * seconds))
    return Item(name, module.TITLE, seconds, tuple(module.WHAT), module.rows, least)


def lists(pattern: str, what: str) -> bool:
    """Whether a line of WHAT means this `what`: {…} in it stands for anything."""
    parts = (re.escape(part) for part in re.split(r"\{[^{}]*\}", pattern))
    return re.fullmatch(".+".join(parts), what, re.DOTALL) is not None
