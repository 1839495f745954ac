# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The options of `gpuwarden policy`, apart from what they do so that naming them loads nothing."""

from __future__ import annotations

import argparse
from pathlib import Path

from agent import doors

SIGNAL_OPTIONS = ("port", "path", "url", "metric", "unit", "binary", "symbol")
_MATCH = (
    "KEY=PATTERN[,KEY=PATTERN…], such as namespace=serving,pod=chat-* or labels.app=chat; or NAMESPACE/POD, or NAME"
)
_EPILOG = """\
without --online and --offline: on a terminal asks about each container that uses a GPU now; elsewhere takes what it
would propose. Examples:
  gpuwarden policy init
  gpuwarden policy init --online serving/chat-* --slo 50ms --offline namespace=batch
  gpuwarden policy init --online web --slo 20ms --signal http --port 8000 --offline 'train-*' policy.yaml
"""


def add_arguments(parser: argparse.ArgumentParser, default: Path) -> None:
    """`init` and `schema`, and what each takes. `word`: which of them it was."""
    words = parser.add_subparsers(required=True, metavar="WORD", dest="word")
    init = words.add_parser(
        "init",
        help="write a commented first policy from what runs now; it slows nothing until it is told to",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_EPILOG,
    )
    add = init.add_argument
    add("file", nargs="?", default=str(default), metavar="FILE", help="where to (%(default)s); - prints it")
    add("--online", action="append", default=[], metavar="MATCH", help=f"has a latency promise: {_MATCH}")
    add("--offline", action="append", default=[], metavar="MATCH", help="may be slowed (as --online)")
    add("--slo", default="50ms", metavar="TARGET", help="what the latency of --online must stay under (%(default)s)")
    add("--quantile", default="0.99", metavar="Q", help="of the latency (%(default)s)")
    add("--signal", default="gpu_wait", help="where the latency comes from: gpu_wait, http, prometheus, uprobe")
    for option in SIGNAL_OPTIONS:
        add(f"--{option}", metavar=option.upper(), help=f"slo.{option}, for a signal that has it (docs/policy.md)")
    add("--force", action="store_true", help="write over a file that is there")
    add("--socket", type=Path, help=doors.HELP)
    words.add_parser("schema", help="print the JSON Schema of policies, for editors")
