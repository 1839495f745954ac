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
from gpu.row import Row

TITLE: Final = "MPS: what it says, what its limits do, who is hurt by whose end"
SECONDS: Final = 45
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
    yield from part(NAME, language.WHATS, lambda: language.rows(here))
    yield from part(NAME, limits.SHARES, lambda: limits.shares(here))
    yield from part(NAME, limits.MEMORY, lambda: limits.memory(here))
    yield from part(NAME, limits.PRIORITY, lambda: limits.priority(here))
    yield from part(NAME, [endings.QUIT], lambda: endings.quitting(here))
    for end in endings.ENDS:
        yield from part(NAME, endings.whats(end), partial(endings.rows, here, end))
