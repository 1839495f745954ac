# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The options of `gpuwarden explain`, apart from it so that naming them loads nothing."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser, run_dir: Path) -> None:
    """The options of `gpuwarden explain`."""
    add = parser.add_argument
    add("container", metavar="CONTAINER", help="its name, pod, namespace/pod, key, or the beginning of its id")
    add("--since", default="1h", metavar="AGO", help="how far to look back: 90s, 10m, 1h at the most (%(default)s)")
    add("--json", action="store_true", help="for programs; see docs/explain.md")
    add("--run-dir", type=Path, default=run_dir, help="where the agent's sockets are (%(default)s)")
    add("--decisions", type=Path, metavar="FILE", help="read this decision log instead of asking the agent")
