# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The Python distributions of an installed tree, by their *.dist-info; nothing of the tree is run."""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution as Metadata
from importlib.metadata import PathDistribution
from pathlib import Path
from typing import Final

from cyclonedx.spdx import fixup_id
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.shipping.version import ROOT

KNOWN: Final = ROOT / "packaging/licences/known.toml"
_CLASSIFIERS: Final = {  # those that mean one licence and no other
    "License :: OSI Approved :: Apache Software License": "Apache-2.0",
    "License :: OSI Approved :: ISC License (ISCL)": "ISC",
    "License :: OSI Approved :: MIT License": "MIT",
    "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "License :: OSI Approved :: zlib/libpng License": "Zlib",
}
_CODE: Final = (".py", ".pyc", ".so")
_TEXT: Final = re.compile(r"(licen[cs]e|copying|copyright|notice|authors|patents)s?([._-][^/]*)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Distribution:
    """One of them. `name`: as PyPI's URLs have it. `folder`: its *.dist-info."""

    name: str
    version: str
    folder: Path
    metadata: Metadata

    @property
    def licence(self) -> str | None:
        """An SPDX expression: of known.toml, else of its metadata where they are unambiguous; None: unknown."""
        metadata = self.metadata.metadata
        if self.name in known():
            return str(known()[self.name]["licence"])
        if "License-Expression" in metadata:
            return str(metadata["License-Expression"])
        named = fixup_id(str(metadata["License"])) if "License" in metadata else None
        classified = {_CLASSIFIERS[text] for text in metadata.get_all("Classifier", []) if text in _CLASSIFIERS}
        return named or (classified.pop() if len(classified) == 1 else None)

    @property
    def requires(self) -> list[str]:
        """Names of those that it needs here, extras that were asked for included where they are installed anyway."""
        found = map(Requirement, self.metadata.requires or [])
        here = (one for one in found if one.marker is None or one.marker.evaluate({"extra": ""}))
        return sorted({canonicalize_name(one.name) for one in here})

    @property
    def record_sha256(self) -> str | None:
        """Hash of its RECORD, which has the hash of each of its files."""
        record = self.folder / "RECORD"
        return hashlib.sha256(record.read_bytes()).hexdigest() if record.is_file() else None

    def texts(self) -> dict[str, Path]:
        """Name → file, of each licence text and notice in its *.dist-info."""
        return {_below(path, self.folder): path for path in _texts_in(self.folder)}


def distributions(tree: Path) -> list[Distribution]:
    """All distributions of the tree, sorted by name."""
    found = []
    for folder in tree.rglob("*.dist-info"):
        metadata = PathDistribution(folder)
        name = canonicalize_name(metadata.metadata["Name"])
        found.append(Distribution(name, metadata.version, folder, metadata))
    return sorted(found, key=lambda one: (one.name, one.version))


def loose_texts(tree: Path) -> dict[str, Path]:
    """Path below site-packages → file, of the texts that packages have beside their code, for parts from elsewhere."""
    roots = sorted({one.folder.parent for one in distributions(tree)})
    return {
        path.relative_to(root).as_posix(): path
        for root in roots
        for path in _texts_in(root)
        if not any(part.endswith(".dist-info") for part in path.relative_to(root).parts)
    }


def _texts_in(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if _TEXT.fullmatch(path.name) and path.suffix not in _CODE)
    return sorted(path for path in found if path.is_file() and not path.is_symlink())


def _below(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder).parts
    return "/".join(parts[1:] if parts[0] in ("licenses", "license_files") else parts)


@cache
def known() -> dict[str, dict[str, str]]:
    """Distribution → what its metadata leave open: licence, source, and the text where it ships none."""
    return tomllib.loads(KNOWN.read_text())
