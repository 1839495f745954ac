# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What was published about the clusters whose traces can be read, to be printed beside what a trace says.

Every figure has a mark that says how it came here, and only marks of `MARKS` exist: a figure that was not seen here
in print is not in this file. Where a figure is of another set of jobs than the trace, its text says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

MARKS: Final = {
    "S": "the authors' abstract or talk",
    "R": "read in the authors' repository",
    "N": "a third person's reading notes of the paper, not checked against it",
}


@dataclass(frozen=True, slots=True)
class Published:
    """A figure, and how it came here."""

    text: str
    mark: str

    def __str__(self) -> str:
        return f"{self.text} [{self.mark}]"


Place = tuple[str, str]
"""Name of a table, first cell of a row; an empty cell: the table as a whole"""

_PHILLY: Final[Mapping[Place, Published]] = {
    ("whole", "jobs"): Published("96,260 in the paper's window", "N"),
    ("whole", "time between them"): Published("75 in the paper's window", "N"),
    ("whole", "queues"): Published("14", "N"),
    ("locality", ""): Published(
        "locality is relaxed after 2–3 minutes; with ⅔ of the GPUs allocated under 4.5 % of the servers are empty", "N"
    ),
    ("utilisation", ""): Published("52 % in the mean, as cited in the talk on TGS", "S"),
    ("utilisation", "all"): Published("52.32", "N"),
    ("utilisation", "1"): Published("52.38", "N"),
    ("utilisation", "4"): Published("45.18", "N"),
}

PUBLISHED: Final[Mapping[str, Mapping[Place, Published]]] = {
    "philly_csv": _PHILLY,
    "philly_log": {
        **_PHILLY,
        ("whole", "jobs"): Published("117,325 in the log, those without an attempt included", "R"),
        ("whole", "first submission"): Published("2017-08-07", "R"),
        ("whole", "last submission"): Published("2017-12-22", "R"),
    },
    "helios": {("whole", "jobs"): Published("1,580,464 with GPUs in all four clusters", "R")},
    "openb": {("whole", "jobs"): Published("8,152 pods, those without a GPU included", "R")},
}
"""Format → place → figure"""
