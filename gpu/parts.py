# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An item's parts, each by itself: what stops one costs its own rows and no others."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

from gpu.here import Unavailable
from gpu.item import blamed
from gpu.row import Row, Verdict, failed, skipped


def part(item: str, whats: Sequence[str], rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Rows of a part. Of `whats`, those that did not come are skipped with why; after a failure the first one fails."""
    seen: set[str] = set()
    try:
        for row in rows():
            seen.add(row.what)
            yield row
    except Unavailable as why:
        yield from (skipped(item, what, str(why)) for what in whats if what not in seen)
    except Exception as error:  # noqa: BLE001 - a part may break in any way, and the others go on
        traceback.print_exc()
        missing = [what for what in whats if what not in seen] or [f"the end of “{whats[-1]}”"]
        yield failed(item, missing[0], blamed(error))
        yield from (skipped(item, what, f"“{missing[0]}” failed before it") for what in missing[1:])


def judged(holds: bool) -> Verdict:
    """Of an assumption."""
    return Verdict.OK if holds else Verdict.DIFFERS
