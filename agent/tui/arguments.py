# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The options of gputop, apart from it so that naming them loads nothing."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Final

from agent.tui.entries import View

INTERVAL_SECONDS: Final = 1.0
SHORTEST_SECONDS: Final = 0.1
LONGEST_SECONDS: Final = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """gputop's options."""
    add = parser.add_argument
    views = parser.add_mutually_exclusive_group()
    for view in View:
        text = f"one row per {view}" + (" (default)" if view is View.CONTAINER else "")
        views.add_argument(f"--by-{view}", dest="view", action="store_const", const=view, help=text)
    parser.set_defaults(view=View.CONTAINER)
    add("-1", "--once", action="store_true", help="show one tick and end")
    add("--json", action="store_true", help="one JSON object per tick: see docs/snapshot.md")
    add("--interval", type=_seconds, default=INTERVAL_SECONDS, metavar="S", help="seconds between ticks (%(default)s)")
    add(
        "-o",
        "--only",
        nargs="+",
        default=[],
        metavar="GPU",
        help="only these devices, by index (a MIG instance: 0:1) or beginning of UUID",
    )
    add("--namespace", metavar="NAME", help="only containers of this Kubernetes namespace")
    add(
        "--light",
        action="store_true",
        help="colours for a light background, which COLORFGBG in the environment tells, too",
    )
    add("--no-color", action="store_true", help="no colours; NO_COLOR in the environment does the same")
    add("--record", type=Path, metavar="FILE", help="also append each tick to FILE, one JSON object a line")
    add("--replay", type=Path, metavar="FILE", help="play FILE back instead of watching: arrows, Home and End seek")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not SHORTEST_SECONDS <= value <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is no interval: give seconds between 0.1 and 3600")
    return value
