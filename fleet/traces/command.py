# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet formats`: the formats of traces, where data in them are, under which licence, and how to get them.

Nothing is fetched: a trace belongs to its authors, and a command is printed for those who accept its licence.
"""

from __future__ import annotations

import argparse
import json

from fleet.traces import FORMATS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object, by name")


def act(options: argparse.Namespace) -> int:
    if options.json:
        formats = {
            name: {
                "summary": known.summary,
                "source": known.source,
                "licence": known.licence,
                "fetch": known.fetch,
            }
            for name, known in FORMATS.items()
        }
        print(json.dumps(formats, ensure_ascii=False, indent=1))
        return 0
    for name, known in FORMATS.items():  # not a table: commands have to be copied whole
        print(f"{name}: {known.summary}")
        print(f"  source:  {known.source}")
        print(f"  licence: {known.licence}")
        print(f"  fetch:   {known.fetch}")
    return 0
