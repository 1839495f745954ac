# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The version of what is built, and its date. The standard library only: a package is built where nothing else is."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parents[2]
_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)(?:(a|b|rc)(\d+))?")


@dataclass(frozen=True, slots=True, order=True)
class Version:
    """X.Y.Z, or X.Y.ZrcN and the like before it (the forms that PEP 440 and Semantic Versioning have in common)."""

    numbers: tuple[int, int, int]
    stage: str = "~"  # of a, b, rc; "~" sorts after them
    number: int = 0

    @classmethod
    def of(cls, text: str) -> Self:
        """Parses a version. ValueError for anything else."""
        found = _VERSION.fullmatch(text)
        if found is None:
            raise ValueError(f"{text!r} is no version: write 1.2.3, or 1.2.3rc1 for a candidate")
        major, minor, patch, stage, number = found.groups()
        return cls((int(major), int(minor), int(patch)), stage or "~", int(number or 0))

    @property
    def debian(self) -> str:
        """The Debian version, which dpkg orders the same way: a tilde sorts before the end."""
        plain = ".".join(map(str, self.numbers))
        return plain if self.stage == "~" else f"{plain}~{self.stage}{self.number}"


def project_version(root: Path = ROOT) -> str:
    """The project's version, read from pyproject.toml."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return str(version)


def build_time(root: Path = ROOT) -> datetime:
    """SOURCE_DATE_EPOCH, else when the last commit was made, else now."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch is None:
        asked = subprocess.run(
            ["git", "-C", str(root), "log", "-1", "--format=%ct"], capture_output=True, text=True, check=False
        )
        epoch = asked.stdout.strip() if asked.returncode == 0 else None
    return datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
