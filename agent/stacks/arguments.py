# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The options of `gpuwarden stacks`, apart, so that other commands need not load what it uses."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent import doors

MOST_SAMPLES = 200  # per second: a stack costs the launching thread some microseconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `gpuwarden stacks`."""
    parser.add_argument("--container", required=True, metavar="X", help="its name, id, key, pod or systemd unit")
    parser.add_argument("--kind", choices=("launch", "alloc"), default="launch", help="what to sample (%(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to look (%(default)s)")
    parser.add_argument(
        "--every", type=int, metavar="N", help=f"one launch in N, at random (as many as keep to {MOST_SAMPLES}/s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE.svg", help="draw a flame graph (else folded stacks)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--socket", type=Path, help=f"{doors.HELP}: it knows names")
    parser.add_argument("--no-symbols", action="store_true", help="modules and offsets; needs no bcc")
