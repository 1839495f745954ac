# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Whether one match surely fits whatever another one fits. Pure.

Sure, not possible: two patterns that some name could satisfy both are no overlap until that name runs.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from enforce.policy.matching import Match, Patterns

_KEYS = ("namespace", "pod", "container", "image", "unit", "cgroup", "user", "command")


def covers(wide: Match, narrow: Match) -> bool:
    """Every container (and process) that fits `narrow` fits `wide`."""
    if wide == Match():
        return False
    narrow_labels = dict(narrow.labels)
    return all(_cover(getattr(wide, key), getattr(narrow, key)) for key in _KEYS) and all(
        _cover(patterns, narrow_labels.get(label, ())) for label, patterns in wide.labels
    )


def about_processes(match: Match) -> bool:
    """Whether it matters if one process must fit or all."""
    return bool(match.user or match.command)


def _cover(wide: Patterns, narrow: Patterns) -> bool:
    if not wide:
        return True
    return bool(narrow) and all(any(_includes(outer, inner) for outer in wide) for inner in narrow)


def _includes(outer: str, inner: str) -> bool:
    """Read as text, `inner` fits `outer`: then its wildcards stand where a wildcard of `outer` takes anything."""
    if outer == inner:
        return True
    if "[" in inner or (set("*?") & set(inner) and set("[?") & set(outer)):
        return False
    return fnmatchcase(inner, outer)
