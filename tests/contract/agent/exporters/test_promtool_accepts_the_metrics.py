# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""promtool, as a judge of names, units and labels."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from agent.exporters.prometheus import collector
from tests.support.snapshots import rich_snapshot


@pytest.fixture
def promtool() -> Path:
    found = shutil.which("promtool")
    assert found, "install Debian's package prometheus"
    return Path(found)


def test_promtool_finds_nothing(promtool: Path) -> None:
    text = collector.render(rich_snapshot())
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_promtool_finds_a_mistake_that_is_there(promtool: Path) -> None:
    text = collector.render(rich_snapshot()).replace("model_name=", "modelName=")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=30, check=False
    )
    assert checked.returncode != 0
