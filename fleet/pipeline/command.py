# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden fleet split PIPELINE.yaml`: each stage's SLO, as fragments to paste into a policy or into pods.

What is printed as text is YAML whole: what it is worth stands in comments. A split that is in use (`--before`, an
earlier `--json`) is kept while it fits and no stage would change by more than a tenth: measured levels always move a
little, and each change makes the node agent start anew with that service.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from fleet.model import FleetError
from fleet.pipeline.document import (
    Document,
    annotation_fragments,
    declared,
    duration,
    policy_fragment,
    read_document,
)
from fleet.pipeline.split import Split, settled, split


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pipeline", type=Path, metavar="PIPELINE.yaml", help="stages with their levels, and the SLO")
    parser.add_argument(
        "--as",
        dest="form",
        choices=("policy", "annotations"),
        default="policy",
        help="rules for a policy's `online` list (default), or annotations for the stages' pods",
    )
    parser.add_argument(
        "--before", type=Path, metavar="FILE", help="an earlier --json: kept if nothing changes by more than 10 %%"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def act(options: argparse.Namespace) -> int:
    document = read_document(options.pipeline)
    found = split(document.pipeline)
    if options.before is not None and settled(document.pipeline, _before_s(options.before), found):
        kept = "# kept: no stage would change by more than 10 %"
        print(options.before.read_text(encoding="utf-8").rstrip() if options.json else kept)
        return 0
    if options.json:
        print(json.dumps(_as_json(document, found), indent=1))
        return 0
    print("\n".join(_comments(found)))
    print((policy_fragment if options.form == "policy" else annotation_fragments)(document, found), end="")
    return 0


def _comments(found: Split) -> list[str]:
    most = "no split leaves more" if found.exact else "the search ended early: another split may leave more"
    lines = [f"# offline work keeps {found.offline:.3g} of {len(found.parts)} GPUs; {most}"]
    width = max(len(part.name) for part in found.parts)
    for part in found.parts:
        level = part.level
        lines.append(
            f"# {part.name:<{width}}  {duration(part.slo_s):>10}  level of {duration(level.latency_s)}, "
            f"offline {level.offline:.0%}"
        )
    return lines


def _as_json(document: Document, found: Split) -> dict[str, Any]:
    stages = {}
    for part in found.parts:
        try:
            annotations_of = declared(document, part)
        except FleetError:  # only a policy can say it
            annotations_of = None
        stages[part.name] = {
            "slo_s": part.slo_s,
            "target": duration(part.slo_s),
            "level_latency_s": part.level.latency_s,
            "offline": part.level.offline,
            "annotations": annotations_of,
        }
    return {"slo_s": document.pipeline.slo_s, "offline": found.offline, "exact": found.exact, "stages": stages}


def _before_s(path: Path) -> dict[str, float]:
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        return {name: float(stage["slo_s"]) for name, stage in stages.items()}
    except OSError as error:
        raise FleetError(f"cannot read {path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FleetError(f"{path} is no output of `gpuwarden fleet split --json`; write it again") from error
