# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""CHANGELOG.md keeps its form, and what is made of it has the same content."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.shipping import announcement
from tools.shipping.changelog import ChangelogError, newest_date, of_version, read
from tools.shipping.version import ROOT, Version, build_time

NOBODY = "Nobody <nobody@example.org>"
NOW = datetime(2026, 3, 4, 5, 6, 7, tzinfo=UTC)
GOOD = """\
# Changelog

What this is.

## [Unreleased]

### Added
- A thing that
  takes two lines.

## [0.2.0] - 2026-02-01

### Fixed
- `this` & <that>.
- Another.

## [0.2.0rc1] - 2026-01-15

### Security
- Old.
"""


def versions() -> st.SearchStrategy[str]:
    number = st.integers(0, 12)
    stage = st.one_of(st.just(""), st.builds("{}{}".format, st.sampled_from(["a", "b", "rc"]), number))
    return st.builds("{}.{}.{}{}".format, number, number, number, stage)


def test_the_changelog_is_of_the_form_and_has_an_entry_for_the_version_that_is_built() -> None:
    releases = read((ROOT / "CHANGELOG.md").read_text())
    somewhere_it_is_tomorrow = timedelta(days=1)
    assert newest_date(releases) <= (datetime.now(UTC) + somewhere_it_is_tomorrow).date()
    assert announcement.main(["--check"]) == 0
    assert announcement.main(["--notes"]) == 0


def test_releases_are_read_with_their_changes() -> None:
    unreleased, newest, oldest = read(GOOD)
    assert (unreleased.version, unreleased.date) == (None, None)
    assert unreleased.changes == {"Added": ["A thing that\ntakes two lines."]}
    assert (newest.version, newest.date) == ("0.2.0", date(2026, 2, 1))
    assert newest.changes == {"Fixed": ["`this` & <that>.", "Another."]}
    assert oldest.version == "0.2.0rc1"
    assert newest_date(read(GOOD)) == date(2026, 2, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("# Changelog", "# Changes", "line 1"),
        ("## [Unreleased]", "## Unreleased", "line 5: write"),
        ("## [Unreleased]", "## [Unreleased] - 2026-02-03", "line 5: write"),
        ("## [Unreleased]", "## [0.3.0] - 2026-02-03", "first release has to be"),
        ("## [0.2.0] - 2026-02-01", "## [0.2.0]", "line 11: write"),
        ("## [0.2.0] - 2026-02-01", "## [0.2] - 2026-02-01", "line 11: '0.2' is no version"),
        ("## [0.2.0] - 2026-02-01", "## [0.2.0] - 2026-02-31", "line 11: day"),
        ("## [0.2.0] - 2026-02-01", "## [Unreleased]", "there once"),
        ("## [0.2.0rc1]", "## [0.2.0]", "the newest comes first"),
        ("2026-01-15", "2026-02-15", "the newest comes first"),
        ("### Fixed", "### Bugs", "line 13: 'Bugs' is no kind"),
        ("### Fixed\n", "", "give the kind of change first"),
        ("- Another.", "### Fixed\n- Another.", "has Fixed already"),
        ("- Old.\n", "", "nothing is under Security"),
        ("### Security\n- Old.\n", "", "without a change"),
        ("  takes", "takes", "line 9: an entry"),
        ("- A thing", "* A thing", "line 8: an entry"),
    ],
)
def test_what_is_not_of_the_form_is_refused_with_its_line(old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(ChangelogError, match=r"(?s)" + message.replace("[", r"\[")):
        read(GOOD.replace(old, new))


def test_debians_changelog_has_the_package_on_top_and_what_was_released_before() -> None:
    assert announcement.debian(read(GOOD), "0.2.0", NOBODY, NOW) == (
        "gpuwarden (0.2.0) bookworm; urgency=medium\n\n  * Fixed:\n    - `this` & <that>.\n    - Another.\n\n"
        " -- Nobody <nobody@example.org>  Sun, 01 Feb 2026 00:00:00 +0000\n\n"
        "gpuwarden (0.2.0~rc1) bookworm; urgency=medium\n\n  * Security:\n    - Old.\n\n"
        " -- Nobody <nobody@example.org>  Thu, 15 Jan 2026 00:00:00 +0000\n"
    )


def test_a_version_that_is_not_released_yet_is_what_is_unreleased_and_is_marked_so() -> None:
    assert announcement.debian(read(GOOD), "0.3.0", NOBODY, NOW).startswith(
        "gpuwarden (0.3.0) UNRELEASED; urgency=medium\n\n  * Added:\n    - A thing that takes two lines.\n\n"
        " -- Nobody <nobody@example.org>  Wed, 04 Mar 2026 05:06:07 +0000\n\ngpuwarden (0.2.0) "
    )


def test_notes_are_the_entries_of_the_version() -> None:
    assert announcement.notes(of_version(read(GOOD), "0.2.0")) == "### Fixed\n\n- `this` & <that>.\n- Another.\n"
    assert announcement.notes(of_version(read(GOOD), "0.3.0")) == "### Added\n\n- A thing that\n  takes two lines.\n"


def test_a_version_without_an_entry_is_refused() -> None:
    silent = read(GOOD.replace("### Added\n- A thing that\n  takes two lines.\n", ""))
    with pytest.raises(ChangelogError, match=r"0\.3\.0 has no entry"):
        of_version(silent, "0.3.0")


def project(folder: Path, version: str) -> list[str]:
    (folder / "CHANGELOG.md").write_text(GOOD)
    (folder / "pyproject.toml").write_text(f'[build-system]\nversion = "9"\n[project]\nversion = "{version}"\n')
    return ["--root", str(folder)]


def test_only_a_version_with_a_dated_entry_is_released(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert announcement.main([*project(tmp_path, "0.2.0"), "--released"]) == 0
    assert announcement.main([*project(tmp_path, "0.3.0"), "--released"]) == 1
    assert capsys.readouterr().err == "CHANGELOG.md: 0.3.0 has no entry: rename [Unreleased] to [0.3.0] - and the day\n"


def test_the_maintainer_is_the_one_of_debians_control_file(tmp_path: Path) -> None:
    (tmp_path / "packaging/deb").mkdir(parents=True)
    (tmp_path / "packaging/deb/control").write_text(f"Source: gpuwarden\nMaintainer: {NOBODY}\n")
    assert announcement.maintainer_of(tmp_path) == NOBODY


def test_the_time_of_building_is_the_one_that_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(int(NOW.timestamp())))
    assert build_time() == NOW


@given(versions(), versions())
def test_versions_are_ordered_as_the_parts_of_them_are(left: str, right: str) -> None:
    """And a candidate before what it is a candidate for."""
    one, other = Version.of(left), Version.of(right)
    assert (one < other) + (one == other) + (one > other) == 1
    assert Version.of(left.partition("rc")[0]) >= one
    assert (one == other) == (one.debian == other.debian)


@pytest.mark.parametrize("text", ["1", "1.2", "1.2.3.4", "v1.2.3", "1.2.3-rc1", "1.2.3~rc1", "1.2.3+local", ""])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no version"):
        Version.of(text)
