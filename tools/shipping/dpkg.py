# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The Debian packages of a tree, out of dpkg's own status files; there are none where the tree is not a system."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path

_DPKG = "var/lib/dpkg"
_SHORT_NAME = re.compile(r"^License: *(\S.*)$", re.MULTILINE)
_COMMON = re.compile(r"/usr/share/common-licenses/([A-Za-z0-9.+-]*[A-Za-z0-9])")


@dataclass(frozen=True, slots=True)
class Package:
    """An installed Debian package."""

    name: str
    version: str
    architecture: str


def packages(tree: Path) -> list[Package]:
    """Out of status, or of status.d where there is a file for each; by name."""
    folder = tree / _DPKG
    files = [folder / "status", *(path for path in folder.glob("status.d/*") if path.suffix != ".md5sums")]
    found = {package for path in files if path.is_file() for package in _installed(path.read_text())}
    return sorted(found, key=lambda one: (one.name, one.architecture, one.version))


def _installed(text: str) -> Iterator[Package]:
    for stanza in re.split(r"\n{2,}", text):
        fields = HeaderParser().parsestr(stanza.lstrip("\n"))
        if "Package" in fields and fields.get("Status", "install ok installed").endswith(" installed"):
            yield Package(fields["Package"], fields["Version"], fields["Architecture"])


def copyright_file(tree: Path, package: Package) -> Path | None:
    """What it says of its licence; None: it is not in the tree. A link that leads out of the tree leads nowhere."""
    path = (tree / "usr/share/doc" / package.name / "copyright").resolve()
    return path if path.is_file() and path.is_relative_to(tree.resolve()) else None


def licence_names(text: str) -> list[str]:
    """Debian's short names, of a file that is machine-readable; else none."""
    return sorted(set(_SHORT_NAME.findall(text))) if text.startswith("Format:") else []


def common_licences(text: str) -> set[str]:
    """The texts that it only refers to, by their names in /usr/share/common-licenses."""
    return set(_COMMON.findall(text))
