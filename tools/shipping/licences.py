# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The licence texts of everything in an installed tree, gathered in one folder: ours, Python's and Debian's parts.

Nothing is shipped without its text: what has none is named, all at once, and nothing is written.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tools.shipping import dpkg
from tools.shipping.allowed import is_allowed
from tools.shipping.distributions import KNOWN, Distribution, distributions, known, loose_texts
from tools.shipping.version import ROOT, project_version

OURS: Final = "Apache-2.0"
_COMMON: Final = "usr/share/common-licenses"
_SPDX: Final = re.compile(r"SPDX-License-Identifier: (.+?)(?: \*/)?$", re.MULTILINE)


class LicenceError(ValueError):
    """Parts must not be shipped as they are; a line for each."""


@dataclass(slots=True)
class Gathered:
    """Path in the folder → the text's file; a line of the index for each part; what is wrong."""

    files: dict[str, Path] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    mistakes: list[str] = field(default_factory=list)

    def add(self, part: str, licence: str, files: dict[str, Path]) -> None:
        """Adds a part with its texts."""
        self.files |= files
        self.lines.append(f"{part}\n    {licence}\n" + "".join(f"    {name}\n" for name in sorted(files)))


def bpf_licence(name: str, root: Path = ROOT) -> str:
    """Of the programs in NAME.bpf.o: an SPDX expression, out of their source's first line."""
    found = _SPDX.search((root / "bpf" / name).with_suffix(".c").read_text())
    if found is None:
        raise LicenceError(f"bpf/{name}: its source does not begin with its licence")
    return re.sub(r"\bGPL-2\.0(?=$|[ )])", "GPL-2.0-only", found[1])  # the kernel's word for it is not SPDX's any more


def gather(tree: Path) -> Gathered:
    """Everything in the tree. `mistakes`: parts without a text, or under a licence that does not go with ours."""
    gathered = Gathered()
    _ours(gathered, tree)
    for one in distributions(tree):
        if one.name != "gpuwarden":
            distribution(gathered, one)
    loose = {f"python/{name}": path for name, path in loose_texts(tree).items()}
    if loose:
        gathered.add("what Python packages have from elsewhere", "as each text says", loose)
    for package in dpkg.packages(tree):
        _package(gathered, tree, package)
    return gathered


def _ours(gathered: Gathered, tree: Path) -> None:
    gathered.add(f"gpuwarden {project_version()}", OURS, {"gpuwarden/LICENSE": ROOT / "LICENSE"})
    objects = sorted({path.name for path in tree.rglob("*.bpf.o")})
    for licence in sorted({bpf_licence(name) for name in objects}):
        texts = sorted({ROOT / "LICENSES" / f"{word}.txt" for word in re.findall(r"[A-Z][\w.-]+\d[\w.-]*", licence)})
        named = {f"gpuwarden/bpf/{path.name}": path for path in texts}
        of = [name for name in objects if bpf_licence(name) == licence]
        gathered.add(f"programs in the kernel: {', '.join(of)}", licence, named)
        if not is_allowed(licence):
            gathered.mistakes.append(f"{', '.join(of)}: {licence} does not go with {OURS}")
    if objects:
        text = {"gpuwarden/bpf/libbpf.txt": ROOT / "packaging/licences/libbpf.txt"}
        gathered.add("libbpf's headers, which are compiled into them", "LGPL-2.1-only OR BSD-2-Clause", text)


def distribution(gathered: Gathered, one: Distribution) -> None:
    """Adds a distribution's texts, and what is wrong with it."""
    looked_up = known().get(one.name, {})
    texts = {f"python/{one.name}/{name}": path for name, path in one.texts().items()}
    if "text" in looked_up:
        texts[f"python/{one.name}/{looked_up['text']}"] = KNOWN.parent / looked_up["text"]
    where = f"python {one.name} {one.version}"
    if not texts:
        gathered.mistakes.append(
            f"{where} ships no licence text: put it into {_here(KNOWN.parent)} and name it in known.toml"
        )
    if one.licence is None:
        gathered.mistakes.append(f"{where} does not say its licence in SPDX's words: look it up for {_here(KNOWN)}")
    elif not is_allowed(one.licence) and "accepted" not in looked_up:
        gathered.mistakes.append(f"{where} is under {one.licence}, which does not go with {OURS}: do without it")
    gathered.add(where, one.licence or "unknown", texts)


def _package(gathered: Gathered, tree: Path, package: dpkg.Package) -> None:
    where = f"debian {package.name} {package.version}"
    found = dpkg.copyright_file(tree, package)
    if found is None:
        gathered.mistakes.append(f"{where} has no usr/share/doc/{package.name}/copyright in the tree: leave it there")
        return
    text = found.read_text(errors="replace")
    texts = {f"debian/{package.name}/copyright": found}
    for name in sorted(dpkg.common_licences(text)):
        common = _common(tree, name)
        if common is None:
            gathered.mistakes.append(f"{where} refers to /{_COMMON}/{name}, which is not here: install base-files")
        else:
            texts[f"debian/common-licenses/{name}"] = common
    gathered.add(where, ", ".join(dpkg.licence_names(text)) or "as its copyright file says", texts)


def _common(tree: Path, name: str) -> Path | None:
    return next((path for path in (tree / _COMMON / name, Path("/") / _COMMON / name) if path.is_file()), None)


def write(gathered: Gathered, folder: Path) -> None:
    """The texts and their index, README. LicenceError where anything is wrong; nothing is written then."""
    if gathered.mistakes:
        raise LicenceError("\n".join(gathered.mistakes))
    for name, source in sorted(gathered.files.items()):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    (folder / "README").write_text("\n".join(_index(gathered)))


def _index(gathered: Gathered) -> Iterator[str]:
    yield "What is in this package, under which licence, and where its text is, in this folder.\n"
    yield from gathered.lines


def _here(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 with a line for each part that must not be shipped as it is."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.shipping.licences", description="Gathers the licence texts of an installed tree."
    )
    parser.add_argument("tree", type=Path, metavar="TREE", help="what is shipped, as if it were the root")
    parser.add_argument("folder", type=Path, metavar="DEST", help="where the texts go; it is made")
    options = parser.parse_args(arguments)
    try:
        write(gather(options.tree), options.folder)
    except ValueError as error:
        sys.stderr.write("".join(f"licences: {line}\n" for line in str(error).split("\n")))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
