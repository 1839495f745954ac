# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`closure.py DEST`: copies what gpuwarden requires from this Python's environment to the folder DEST.

So what is shipped is what the tests ran with. Each file has to be as its distribution's RECORD says; programs and other
things outside of site-packages are left out. Python's packaging library reads the requirements.
"""

from __future__ import annotations

import base64
import hashlib
import shutil
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def closure(required: Iterable[str]) -> dict[str, Distribution]:
    """Name → distribution, of all that these requirements need here, extras that are asked for included."""
    found: dict[str, Distribution] = {}
    wanted = [(Requirement(text), "") for text in required]
    seen = set()
    while wanted:
        requirement, extra = wanted.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        one = distribution(requirement.name)
        if one.version not in requirement.specifier:
            raise PackageNotFoundError(f"{requirement} (there is {one.version})")
        found[one.name.lower()] = one
        for also in ("", *requirement.extras):
            if (one.name, also) not in seen:
                seen.add((one.name, also))
                wanted += [(Requirement(text), also) for text in one.requires or []]
    return found


def copy(one: Distribution, target: Path) -> None:
    """Its files, as they were published. Raises ValueError for one that is not."""
    for file in one.files or []:
        if ".." in file.parts or "__pycache__" in file.parts:
            continue
        source = Path(str(file.locate()))
        if file.hash is not None:
            digest = hashlib.new(file.hash.mode, source.read_bytes()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                raise ValueError(f"{source} is not as it was published: remove .venv and run `make setup`")
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target / file)


def main() -> int:
    """0; 1 where something is missing or has been changed, with a line that says so."""
    try:
        for one in closure(tomllib.loads(PROJECT.read_text())["project"]["dependencies"]).values():
            copy(one, Path(sys.argv[1]))
    except (PackageNotFoundError, ValueError) as error:
        sys.stderr.write(f"closure: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
