# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m tools.shipping.closure DEST`: copies what gpuwarden requires from this Python's environment to DEST.

With `--extra NAME` it is what that extra requires beyond it.
So what is shipped is what the tests ran with. Invariant: each file is as its distribution's RECORD lists it. Scripts
and other files outside of site-packages are left out.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import shutil
import sys
import tomllib
from collections.abc import Iterable, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from tools.shipping.version import ROOT


def requirements(root: Path = ROOT, extra: str | None = None) -> list[str]:
    """What the product, or an extra of it alone, requires, as pyproject.toml lists it."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    return list(project["dependencies"] if extra is None else project["optional-dependencies"][extra])


def closure(required: Iterable[str]) -> dict[NormalizedName, Distribution]:
    """Name → distribution, of all that these requirements need here, with the extras that they ask for.

    PackageNotFoundError: one is not installed, or not in a version that is required.
    """
    found: dict[NormalizedName, Distribution] = {}
    wanted = [(Requirement(text), "") for text in required]
    visited = set()
    while wanted:
        requirement, extra = wanted.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        installed = distribution(requirement.name)
        if installed.version not in requirement.specifier:
            raise PackageNotFoundError(f"{requirement} (installed: {installed.version})")
        name = canonicalize_name(installed.name)
        found[name] = installed
        for extra_of_it in ("", *requirement.extras):
            if (name, extra_of_it) not in visited:
                visited.add((name, extra_of_it))
                wanted += [(Requirement(text), extra_of_it) for text in installed.requires or []]
    return found


def copy(installed: Distribution, target: Path) -> None:
    """Its files, as they were published. ValueError: one has been changed since."""
    for file in installed.files or []:
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        source = Path(str(file.locate()))
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, source.read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                raise ValueError(f"{source} is not as it was published: remove .venv and run `make setup`")
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where something is missing or has been changed, with a line on stderr."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.shipping.closure", description="Copies what gpuwarden requires, as it is installed here."
    )
    parser.add_argument("folder", type=Path, metavar="DEST", help="where to")
    parser.add_argument("--extra", metavar="NAME", help="only what this extra requires beyond it")
    options = parser.parse_args(arguments)
    try:
        wanted = closure(requirements())
        if options.extra is not None:
            more = closure(requirements(extra=options.extra))
            wanted = {name: installed for name, installed in more.items() if name not in wanted}
        for installed in wanted.values():
            copy(installed, options.folder)
    except (PackageNotFoundError, ValueError) as error:
        sys.stderr.write(f"closure: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
