# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The line of a policy that a message is about, and the carets under the place. Pure.

What is shown cannot steer a terminal, and is as wide there as the carets take it to be.
"""

from __future__ import annotations

from rich.cells import cell_len

from agent.names import printable
from agent.yaml_source import Place

_WIDEST = 100
_BEFORE = 60  # of a line that is wider than that, how much is kept before the place


def excerpt(text: str, place: Place) -> tuple[str, str]:
    """The line and, under it, the carets; of a long line what is round the place."""
    lines = text.split("\n")
    line = lines[place.line - 1].rstrip("\r") if place.line <= len(lines) else ""
    at, end = place.column - 1, place.column - 1 + max(1, place.width)
    start = max(0, at - _BEFORE) if len(line) > _WIDEST else 0
    head = ("…" if start else "") + printable(line[start:at])
    marked, tail = printable(line[at:end], _WIDEST), printable(line[end : start + _WIDEST])
    more = "…" if end < start + _WIDEST < len(line) else ""
    return head + marked + tail + more, " " * cell_len(head) + "^" * max(1, cell_len(marked))
