# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is made of CHANGELOG.md: release notes, and Debian's changelog."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Final

from tools.shipping.changelog import ChangelogError, Release, of_version, read
from tools.shipping.version import ROOT, Version, build_time, project_version

_SUITE: Final = "bookworm"  # the Debian whose Python the package brings its environment for
_CONTROL: Final = "packaging/deb/control"
_DEFAULT_MAINTAINER: Final = "The GPU Warden authors <maintainers@gpuwarden.invalid>"


def notes(release: Release) -> str:
    """The release notes, Markdown."""
    parts = [f"### {kind}\n\n" + "\n".join(_item(entry) for entry in release.changes[kind]) for kind in release.changes]
    return "\n\n".join(parts) + "\n"


def _item(entry: str) -> str:
    return "- " + entry.replace("\n", "\n  ")


def debian(releases: Sequence[Release], version: str, maintainer: str, now: datetime) -> str:
    """debian/changelog, the package's own version on top. `now`: the date of a version that is not released yet."""
    newest = of_version(releases, version)
    older = [
        release
        for release in releases
        if release.version is not None and release is not newest and Version.of(release.version) < Version.of(version)
    ]
    stanzas = [_stanza(newest, version, maintainer, now)]
    stanzas += [_stanza(release, release.version or "", maintainer, now) for release in older]
    return "\n".join(stanzas)


def _stanza(release: Release, version: str, maintainer: str, now: datetime) -> str:
    suite = _SUITE if release.date else "UNRELEASED"
    when = datetime(release.date.year, release.date.month, release.date.day, tzinfo=UTC) if release.date else now
    lines = [f"gpuwarden ({Version.of(version).debian}) {suite}; urgency=medium", ""]
    for kind, entries in release.changes.items():
        lines.append(f"  * {kind}:")
        lines += [line for entry in entries for line in _wrapped(entry)]
    return "\n".join([*lines, "", f" -- {maintainer}  {format_datetime(when)}", ""])


def _wrapped(entry: str) -> Iterator[str]:
    text = " ".join(entry.split())
    yield from textwrap.wrap(text, 79, initial_indent="    - ", subsequent_indent="      ", break_on_hyphens=False)


def maintainer_of(root: Path = ROOT) -> str:
    """The maintainer that Debian's control file names."""
    path = root / _CONTROL
    found = re.search(r"^Maintainer: *(.+)$", path.read_text(), re.MULTILINE) if path.is_file() else None
    return found[1] if found else _DEFAULT_MAINTAINER


def main(arguments: Sequence[str] | None = None) -> int:
    """0; 1 where the changelog is wrong or says nothing of the version, with a line that says so."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.shipping.announcement", description="What is made of CHANGELOG.md, on stdout."
    )
    parser.add_argument("--root", type=Path, default=ROOT, metavar="DIR", help="the repository (%(default)s)")
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--check", action="store_true", help="only say whether its form is right")
    asked.add_argument("--debian", action="store_true", help="debian/changelog")
    asked.add_argument("--notes", action="store_true", help="the notes of the project's version, Markdown")
    asked.add_argument("--released", action="store_true", help="check that the project's version has a dated entry")
    options = parser.parse_args(arguments)
    try:
        releases = read((options.root / "CHANGELOG.md").read_text())
        version = project_version(options.root)
        if options.debian:
            sys.stdout.write(debian(releases, version, maintainer_of(options.root), build_time(options.root)))
        elif options.notes:
            sys.stdout.write(notes(of_version(releases, version)))
        elif options.released and of_version(releases, version).date is None:
            raise ChangelogError(f"{version} has no entry: rename [Unreleased] to [{version}] - and the day")
    except ValueError as error:
        sys.stderr.write(f"CHANGELOG.md: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
