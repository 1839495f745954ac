# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`gpuwarden check --web-config FILE`: whether the agent would take it. Secrets are in it: no line is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TextIO

from agent.errors import WebConfigError
from agent.names import printable
from agent.webconfig.file import Judged, examine
from agent.yaml_source import Problem


def check(path: Path, as_json: bool, out: TextIO) -> int:
    """Print one line if it is right, else every mistake. Exit code 0 or 2."""
    judged = examine(path)
    if as_json:
        json.dump(_document(judged), out, indent=2)
        out.write("\n")
    else:
        out.writelines(f"{printable(line)}\n" for line in _lines(judged))
    return 0 if judged.terms is not None else WebConfigError.exit_code


def _lines(judged: Judged) -> list[str]:
    if judged.terms is not None:
        return [f"{judged.name}: ok: {judged.terms}"]
    return [f"{judged.name}:{one.place.line}:{one.place.column}: error: {one.text}" for one in judged.problems]


def _document(judged: Judged) -> dict[str, object]:
    """As `check POLICY --json` has it, without excerpts."""
    return {
        "file": judged.name,
        "ok": judged.terms is not None,
        "summary": None if judged.terms is None else str(judged.terms),
        "findings": list(map(_finding, judged.problems)),
    }


def _finding(problem: Problem) -> dict[str, object]:
    place = problem.place
    where = {"line": place.line, "column": place.column, "width": place.width, "excerpt": None}
    return {"severity": "error", **where, "text": problem.text}
