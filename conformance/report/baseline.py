# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the simulated GPU gave, written down once: the baselines of the item calibration.
conformance/report/simulated.toml."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from conformance.report.model import Verdict

PLACE: Final = Path(__file__).parent / "simulated.toml"
_HEAD: Final = """\
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
#
# What the item calibration gave on the simulated GPU, by `what`. Written by `python -m conformance.checks.calibration
# REPORT`.
"""
_USABLE: Final = (Verdict.OK, Verdict.DIFFERS, Verdict.MEASURED)


@dataclass(frozen=True, slots=True)
class Recorded:
    """`figures`: by the row's `what`, in its unit."""

    date: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path = PLACE) -> Recorded:
        """The recorded figures; empty where none is."""
        if not path.exists():
            return cls()
        made = tomllib.loads(path.read_text())
        return cls(str(made["date"]), {what: float(figure) for what, figure in made["figures"].items()})


def text_of(report: Mapping[str, Any], item: str) -> str:
    """A report's figures of the item, to be written down. ValueError where they are no simulated GPU's, or too few."""
    if report["source"] != "simulated" or report["quick"]:
        raise ValueError("only a whole run on the simulated GPU is written down: not a real one's, and not --quick")
    rows = [row for row in report["rows"] if row["item"] == item]
    broken = [row["what"] for row in rows if Verdict(row["verdict"]) not in _USABLE]
    if broken or not rows:
        raise ValueError(f"not all was measured: {', '.join(broken) or 'nothing was'}")
    lines = [f"{json.dumps(row['what'], ensure_ascii=False)} = {float(row['figure'])!r}" for row in rows]
    return "\n".join([_HEAD, f'date = "{report["date"][:10]}"', "", "[figures]", *lines, ""])
