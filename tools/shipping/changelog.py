# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""CHANGELOG.md, read strictly: the form is https://keepachangelog.com/en/1.1.0/. The standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from typing import Final

from tools.shipping.version import Version

KINDS: Final = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
_RELEASE: Final = re.compile(r"## \[(?P<version>[^\]]+)\](?: - (?P<date>\d{4}-\d{2}-\d{2}))?")


class ChangelogError(ValueError):
    """The changelog is not what it has to be; the message names the line."""


@dataclass(slots=True)
class Release:
    """A version and its changes: kind → entries, as they stand, Markdown. Not released: no version, no date."""

    version: str | None
    date: date | None
    line: int
    changes: dict[str, list[str]] = field(default_factory=dict)


def read(text: str) -> list[Release]:
    """Releases, newest first, what is not released yet before them. ChangelogError for what is not of the form."""
    releases: list[Release] = []
    entries: list[str] | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("## "):
            releases.append(_release(line, number))
            entries = None
        elif line.startswith("### ") and releases:
            entries = _section(releases[-1], line.removeprefix("### "), number)
        elif line and releases:
            _entry(entries, line, number)
    if not text.startswith("# Changelog\n"):
        raise ChangelogError('line 1: begin with "# Changelog"')
    _check(releases)
    return releases


def _release(line: str, number: int) -> Release:
    found = _RELEASE.fullmatch(line)
    if found is None or (found["version"] == "Unreleased") != (found["date"] is None):
        raise ChangelogError(f"line {number}: write ## [Unreleased] or ## [1.2.3] - 2026-01-31")
    if found["date"] is None:
        return Release(None, None, number)
    try:
        Version.of(found["version"])
        return Release(found["version"], date.fromisoformat(found["date"]), number)
    except ValueError as error:
        raise ChangelogError(f"line {number}: {error}") from error


def _section(release: Release, kind: str, number: int) -> list[str]:
    if kind not in KINDS:
        raise ChangelogError(f"line {number}: {kind!r} is no kind of change; there are {', '.join(KINDS)}")
    if kind in release.changes:
        raise ChangelogError(f"line {number}: this release has {kind} already: put the lines there")
    return release.changes.setdefault(kind, [])


def _entry(entries: list[str] | None, line: str, number: int) -> None:
    if entries is None:
        raise ChangelogError(f"line {number}: give the kind of change first: ### {', ### '.join(KINDS)}")
    if line.startswith("- "):
        entries.append(line.removeprefix("- "))
    elif line.startswith("  ") and entries:
        entries[-1] += f"\n{line.removeprefix('  ')}"
    else:
        raise ChangelogError(f'line {number}: an entry begins with "- ", its further lines with two spaces')


def _check(releases: list[Release]) -> None:
    if not releases or releases[0].version is not None:
        raise ChangelogError("the first release has to be ## [Unreleased], even where there is nothing under it yet")
    for release in releases:
        for kind, entries in release.changes.items():
            if not entries:
                raise ChangelogError(
                    f"line {release.line}: nothing is under {kind} of this release: remove the heading"
                )
    for release in releases[1:]:
        if not release.changes:
            raise ChangelogError(f"line {release.line}: a release without a change")
    for newer, older in pairwise(releases[1:]):
        later, earlier = _order(newer), _order(older)
        if later[0] <= earlier[0] or later[1] < earlier[1]:
            raise ChangelogError(f"line {older.line}: the newest comes first, by version and by date")


def _order(release: Release) -> tuple[Version, date]:
    if release.version is None or release.date is None:
        raise ChangelogError(f"line {release.line}: ## [Unreleased] is there once, at the top")
    return Version.of(release.version), release.date


def newest_date(releases: Iterable[Release]) -> date:
    """The day of the last release: what is generated for it does not change with the day on which it is made."""
    for release in releases:
        if release.date is not None:
            return release.date
    raise ChangelogError("no release has a date yet: ## [1.2.3] - 2026-01-31")


def of_version(releases: Iterable[Release], version: str) -> Release:
    """Its entry, or what is not released yet, where that is to become it. ChangelogError: both are empty."""
    unreleased, *released = releases
    for release in released:
        if release.version == version:
            return release
    if not unreleased.changes:
        raise ChangelogError(f"{version} has no entry, and nothing is under [Unreleased]")
    return unreleased
