# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Locking and saving another process's CUDA work through the driver (cuCheckpointProcess…), with the product's code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from conformance.checks.checkpoint import cycle, killed, neighbours, refusals
from conformance.checks.checkpoint.stage import NAME, Stage
from conformance.host import Host
from conformance.report.model import Row, part

TITLE: Final = "locking, saving and restoring another process"
SECONDS: Final = 60
LEAST_SECONDS: Final = 27
_HELPER: Final = tuple(killed.HELPER.format(act=act) for act in killed.ACTS)
WHAT: Final = (
    *cycle.WHATS,
    *cycle.EXTRAS,
    *refusals.WHATS,
    *_HELPER,
    *neighbours.WHATS,
    *refusals.BUSY,
    *refusals.HELD,
    *killed.WHATS,
    *refusals.ROOM,
    *refusals.UNDER_MPS,
)


def rows(host: Host) -> Iterator[Row]:
    """What might leave something hanging comes last; each part has processes of its own."""
    stage = Stage(host)
    yield from part(NAME, cycle.WHATS, lambda: cycle.rows(stage))
    yield from part(NAME, [cycle.GRAPH], lambda: cycle.extras(stage, cycle.GRAPH, "--graph"))
    yield from part(NAME, [cycle.PINNED], lambda: cycle.extras(stage, cycle.PINNED, "--pinned", str(1 << 24)))
    yield from part(NAME, refusals.WHATS, lambda: refusals.rows(stage))
    yield from part(NAME, _HELPER, lambda: killed.helper(stage))
    yield from part(NAME, neighbours.WHATS, lambda: neighbours.rows(stage))
    yield from part(NAME, refusals.BUSY, lambda: refusals.busy(stage))
    yield from part(NAME, refusals.HELD, lambda: refusals.stopped(stage))
    yield from part(NAME, killed.WHATS, lambda: killed.rows(stage))
    yield from part(NAME, refusals.ROOM, lambda: refusals.room(stage))
    yield from part(NAME, refusals.UNDER_MPS, lambda: refusals.under_mps(stage))
