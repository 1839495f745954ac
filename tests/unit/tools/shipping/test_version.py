# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The version stands in one place; everything else that has it derives it."""

from __future__ import annotations

import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest

from gpuwarden.main import main
from tools.shipping.version import ROOT, project_version

# Where it stands, where it is history, and what is made of it and compared by a test.
MAY_SAY_IT = ("pyproject.toml", "CHANGELOG.md", "packaging/man/", "packaging/kubernetes/")


def places(root: Path, wanted: str) -> list[str]:
    """FILE:LINE of each text below the folder that has the version in it."""
    listed = subprocess.check_output(["git", "-C", str(root), "ls-files", "-z", "-co", "--exclude-standard"], text=True)
    pattern = re.compile(rf"(?<![\w.-]){re.escape(wanted)}(?![\w-]|\.\d)")
    found = []
    for name in filter(None, listed.split("\0")):
        path = root / name
        text = path.read_text(errors="replace") if path.is_file() and not path.is_symlink() else ""
        found += [f"{name}:{number}" for number, line in enumerate(text.splitlines(), 1) if pattern.search(line)]
    return found


def test_no_other_file_contains_the_version() -> None:
    assert [place for place in places(ROOT, project_version()) if not place.startswith(MAY_SAY_IT)] == []


def test_a_file_that_contains_the_version_is_found(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "chart.yaml").write_text("name: x\nversion: 1.2.3\n")
    (tmp_path / "notes.md").write_text("11.2.3 1.2.34 1.2.3.4 x-1.2.3\nfrom 1.2.3.\n")
    assert places(tmp_path, "1.2.3") == ["chart.yaml:2", "notes.md:2"]


def test_the_installed_agent_and_its_version_option_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert version("gpuwarden") == project_version(), "run: make setup"
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"gpuwarden {project_version()}\n"


def test_what_packages_ask_prints_it() -> None:
    assert subprocess.check_output([ROOT / "packaging/version.sh"], text=True) == f"{project_version()}\n"
