# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""MPS: its languages and commands, limits, priority, and the ends of clients. Private daemons, one for each part."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

from gpu.here import Here
from gpu.mps import endings, language, limits
from gpu.mps.stage import NAME
from gpu.parts import part
from gpu.row import Row, Verdict, skipped

TITLE: Final = "MPS: what it says, what its limits do, who is hurt by whose end"
SECONDS: Final = 75
LEAST_SECONDS: Final = 38
WHAT: Final = (
    *language.WHATS,
    *limits.SHARES,
    *limits.MEMORY,
    *limits.PRIORITY,
    endings.QUIT,
    *(what for end in endings.ENDS for what in endings.whats(end)),
)


def rows(here: Here) -> Iterator[Row]:
    """The gentlest first."""
    works = False
    for row in part(NAME, language.WHATS, lambda: language.rows(here)):
        works = works or (row.what == language.SERVER and row.verdict is Verdict.OK)
        yield row
    if not works:
        yield from (skipped(NAME, what, f"see “{language.SERVER}”") for what in WHAT[len(language.WHATS) :])
        return
    yield from part(NAME, limits.SHARES, lambda: limits.shares(here))
    yield from part(NAME, limits.MEMORY, lambda: limits.memory(here))
    yield from part(NAME, limits.PRIORITY, lambda: limits.priority(here))
    yield from part(NAME, [endings.QUIT], lambda: endings.quitting(here))
    for end in endings.ENDS:
        yield from part(NAME, endings.whats(end), partial(endings.rows, here, end))
