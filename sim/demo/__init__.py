# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden demo`: two containers on one simulated GPU, each alone, both uncontrolled, both under GPU Warden.

"Alone" is measured before the agent exists, so what watching costs is in the other figures. The same arrivals come in
every phase.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from agent.node.preflight import require_this_machine
from sim.demo.phases import run
from sim.demo.screen import Screen
from sim.demo.stage import Stage


def main(arguments: Sequence[str]) -> int:
    """Runs the demo; returns 0 when every figure reached its mark, 1 when one did not."""
    parser = argparse.ArgumentParser(prog="gpuwarden demo", description=__doc__)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    require_this_machine()
    signal.signal(signal.SIGTERM, _interrupt)
    with tempfile.TemporaryDirectory(prefix="gpuwarden-demo-") as folder:
        screen = Screen(plain=options.plain or not sys.stdout.isatty())
        figures = run(Stage(Path(folder)), options.seconds, screen)
    screen.table(figures)
    if options.json:
        options.json.write_text(json.dumps(figures.to_json(), indent=1) + "\n")
    return 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The demo's options."""
    add = parser.add_argument
    add("--seconds", type=_seconds, default=25.0, help="length of each measured phase (%(default)s)")
    add("--json", type=Path, metavar="FILE", help="also write the figures as one JSON object")
    add("--plain", action="store_true", help="plain lines, as without a terminal")


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _seconds(text: str) -> float:
    value = float(text)
    if not 8 <= value <= 3600:
        raise argparse.ArgumentTypeError("give between 8 and 3600 seconds: the first 5 of each phase are warm-up")
    return value
