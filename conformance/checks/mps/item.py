# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""MPS: languages, commands, servers, limits, priority, and ends of clients. A private daemon for each part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

from conformance.checks.mps import endings, language, limits, servers
from conformance.checks.mps.stage import NAME
from conformance.host import Host
from conformance.report.model import Row, Verdict, part, skipped

TITLE: Final = "MPS: what it says, what its limits do, who is hurt by whose end"
SECONDS: Final = 85
LEAST_SECONDS: Final = 39
WHAT: Final = (
    *language.PRODUCT,
    *language.WHATS,
    *(*servers.STARTING, *servers.VALUES, *servers.LISTS, *servers.SHUTDOWN),
    *limits.SHARES,
    *limits.MEMORY,
    *limits.PRIORITY,
    endings.QUIT,
    *(what for end in endings.ENDS for what in endings.whats(end)),
)


def rows(host: Host) -> Iterator[Row]:
    """The gentlest first. Those who end by a signal need no commands, and so are looked at whatever the daemon says."""
    yield from part(NAME, language.PRODUCT, lambda: language.product(host))
    works = False
    for row in part(NAME, language.WHATS, lambda: language.rows(host)):
        works = works or (row.what == language.SERVER and row.verdict is Verdict.OK)
        yield row
    commanded: list[tuple[Sequence[str], Callable[[Host], Iterator[Row]]]] = [
        (servers.STARTING, servers.starting),
        (servers.VALUES, servers.values),
        (servers.LISTS, servers.lists),
        (servers.SHUTDOWN, servers.shutdown),
        (limits.SHARES, limits.shares),
        (limits.MEMORY, limits.memory),
        (limits.PRIORITY, limits.priority),
        ([endings.QUIT], endings.quitting),
        (endings.whats(endings.TERMINATED), partial(endings.rows, end=endings.TERMINATED)),
    ]
    for whats, found in commanded:
        if works:
            yield from part(NAME, whats, partial(found, host))
        else:
            yield from (skipped(NAME, what, f"see “{language.SERVER}”") for what in whats)
    for end in (endings.TERM, endings.KILLED):
        yield from part(NAME, endings.whats(end), partial(endings.rows, host, end))
