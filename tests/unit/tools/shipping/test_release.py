# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is no release is not built as one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tools.shipping.version import ROOT


def git(folder: Path, *words: str) -> None:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org", "-c", "commit.gpgsign=false")
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A clean one, whose version has a dated entry; what is built is not in it."""
    folder = tmp_path / "repository"
    built = shutil.ignore_patterns("__pycache__", "image")
    for name in ("packaging", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=built)
    (folder / "pyproject.toml").write_text('[project]\nversion = "1.2.3"\n')
    (folder / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n## [1.2.3] - 2026-01-02\n\n### Added\n- All.\n"
    )
    (folder / ".gitignore").write_text("__pycache__/\n/build/\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "all")
    return folder


def refusal(repository: Path, *options: str) -> str:
    """What it prints of why it built nothing."""
    done = subprocess.run([repository / "packaging/release.sh", *options], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert not list((repository / "build").glob("release/*"))
    return done.stderr


def test_a_tree_that_is_not_clean_is_not_released(repository: Path) -> None:
    assert "not clean" not in refusal(repository)  # it fails later: there is no environment to build in
    (repository / "new").touch()
    assert "release: the tree is not clean" in refusal(repository)


def test_a_version_without_a_dated_entry_is_not_released(repository: Path) -> None:
    (repository / "pyproject.toml").write_text('[project]\nversion = "1.2.4"\n')
    git(repository, "commit", "-qam", "next")
    assert "release: write the entry of 1.2.4, or give --snapshot" in refusal(repository)


def test_not_even_a_snapshot_is_built_where_the_changelog_is_not_of_its_form(repository: Path) -> None:
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n")
    assert "CHANGELOG.md: line 3: write" in refusal(repository, "--snapshot")
