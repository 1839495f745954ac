# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The cases of the hostile set that are tests: whoever lies to the agent, or gives it files, names and answers to read.

A test of these asserts what is seen and what contains it, so one that passes is both. pytest's report is in its JUnit
format.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from bench.hostile.cases import Threat

_ROOT: Final = Path(__file__).resolve().parents[2]
_LIMIT_SECONDS: Final = 1800
SUITES: Final[Mapping[Threat, tuple[str, ...]]] = {
    Threat.EVADES: (
        "tests/hostile/test_other_libraries.py",
        "tests/hostile/test_stops.py",
        "tests/hostile/test_unprobed.py",
    ),
    Threat.HURTS: (
        "tests/hostile/test_blinding.py",
        "tests/hostile/test_claims.py",
        "tests/hostile/test_identity.py",
        "tests/hostile/test_numbers.py",
        "tests/hostile/test_numbers_on_a_node.py",
        "tests/kernel/memory/test_parked_charges.py",
    ),
    Threat.CLIENT: ("tests/hostile/test_http.py", "tests/hostile/test_web.py"),
    Threat.USER: (
        "tests/contract/agent/node/test_hostile_files.py",
        "tests/contract/enforce/recovery/test_decoys.py",
        "tests/unit/agent/config/test_trusted_path.py",
        "tests/unit/agent/core/test_hostile_names.py",
    ),
    Threat.ANSWERS: (
        "tests/contract/agent/containers/test_pod_resources.py",
        "tests/contract/agent/containers/test_sockets_that_misbehave.py",
        "tests/contract/enforce/actuators/test_mps_answers.py",
        "tests/contract/enforce/signals/test_fetching_metrics.py",
        "tests/unit/agent/probes/test_hostile_libraries.py",
        "tests/unit/enforce/ledger/test_ledger.py",
    ),
}


def run(threat: Threat, folder: Path) -> list[dict[str, Any]]:
    """The rows of one threat's tests, one after another."""
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *SUITES[threat]]
    subprocess.run(command, cwd=_ROOT, capture_output=True, timeout=_LIMIT_SECONDS)
    return list(rows(threat, report.read_text() if report.exists() else "", SUITES[threat]))


def rows(threat: Threat, report: str, files: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each test in the report. Where there is no report, one for each file, which is not ok."""
    if not report:
        yield from (_row(threat, file, False, "pytest wrote no report") for file in files)
        return
    for test in ElementTree.fromstring(report).iter("testcase"):
        name = f"{test.get('classname', '').rpartition('.')[2]}::{test.get('name')}"
        skipped, failure = test.find("skipped"), test.find("failure")
        broken = failure if failure is not None else test.find("error")
        if skipped is not None:
            yield _row(threat, name, None, f"skipped: {skipped.get('message')}")
        else:
            yield _row(threat, name, broken is None, "" if broken is None else str(broken.get("message"))[:300])


def _row(threat: Threat, name: str, passed: bool | None, why: str) -> dict[str, Any]:
    return {
        "case": name,
        "threat": str(threat),
        "expected": "as its name says",
        "seen": passed,
        "contained": passed,
        "online_p99_ratio": None,
        "ok": passed,
        "why": why,
    }
