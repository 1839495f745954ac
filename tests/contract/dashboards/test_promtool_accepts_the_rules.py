# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""promtool, as a judge of the rules: their syntax, and when they fire and when not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dashboards.generated import FOLDER, RULES

CASES = sorted((FOLDER / "rules/tests").glob("*.yaml"))


@pytest.fixture
def promtool() -> Path:
    found = shutil.which("promtool")
    assert found, "install Debian's package prometheus"
    return Path(found)


@pytest.mark.parametrize("name", RULES)
def test_promtool_reads_the_rules_and_their_templates(promtool: Path, name: str) -> None:
    checked = subprocess.run(
        [promtool, "check", "rules", FOLDER / f"rules/{name}.yaml"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_rules_fire_when_they_should_and_only_then(promtool: Path, path: Path) -> None:
    tested = subprocess.run([promtool, "test", "rules", path], capture_output=True, text=True, timeout=120)
    assert tested.returncode == 0, tested.stdout + tested.stderr
