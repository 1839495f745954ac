# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Reads the usage ledger's file: sums over hours, grouped as asked. It never writes and never blocks the agent.

Invariant: Σ rows = total, whatever the grouping; what no container is known to have caused is a row like any other.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple

from agent.core.errors import SetupError
from agent.exporters.usage.amounts import AmountKind, Amounts
from agent.exporters.usage.store import check_version, unusable

_SUMS: Final = """
    SELECT kind, at, namespace, pod, owner.name, key, image, uuid, number, sm, memory,
        tx_high, tx_low, rx_high, rx_low, launches_high, launches_low FROM (
        SELECT {hour} AS at, owner AS whose, device AS place, sum(sm_seconds) AS sm, sum(memory_byte_seconds) AS memory,
            sum(pcie_tx_bytes >> 32) AS tx_high, sum(pcie_tx_bytes & 0xffffffff) AS tx_low,
            sum(pcie_rx_bytes >> 32) AS rx_high, sum(pcie_rx_bytes & 0xffffffff) AS rx_low,
            sum(launches >> 32) AS launches_high, sum(launches & 0xffffffff) AS launches_low
        FROM usage WHERE hour >= ? AND hour < ? GROUP BY at, whose, place)
    JOIN owner ON owner.id = whose JOIN device ON device.id = place
"""
_SHOWN: Final = {
    "hour": ("hour",),
    "namespace": ("namespace",),
    "pod": ("namespace", "pod"),
    "container": ("namespace", "pod", "container", "key"),
    "image": ("image",),
    "device": ("device", "gpu"),
}


class By(StrEnum):
    """What rows are grouped by."""

    HOUR = "hour"
    NAMESPACE = "namespace"
    POD = "pod"
    CONTAINER = "container"
    IMAGE = "image"
    DEVICE = "device"


class Group(NamedTuple):
    """The owner of a row of the report. None: not grouped by this, or unknown."""

    kind: AmountKind | None  # None: containers and the unattributed together
    hour: int | None = None
    namespace: str | None = None
    pod: str | None = None
    container: str | None = None
    key: str | None = None
    image: str | None = None
    device: str | None = None
    gpu: int | None = None  # the device's number on the node


@dataclass(slots=True)
class Report:
    """`since` and `until` are what was asked for; `first` and `last` the first and the last hour that has rows."""

    since: int
    until: int
    first: int | None = None
    last: int | None = None
    dropped_rows: int = 0
    rows: dict[Group, Amounts] = field(default_factory=dict)
    total: Amounts = field(default_factory=Amounts)
    devices: Amounts = field(default_factory=Amounts)  # as the hardware counts


def read(path: Path, since: int, until: int, by: Sequence[By]) -> Report:
    """The use in the hours that begin in [since, until). SetupError when there is no ledger to read."""
    with closing(_open(path)) as db:
        try:
            if not check_version(db, path):
                raise SetupError(f"{path} is empty: the agent has not written to it yet; wait, or see the agent's log")
            db.execute("BEGIN")  # one state of the file for all that follows
            report = Report(since, until, *_hours(db, since, until), _dropped(db))
            for group, amounts in _sums(db, since, until, by):
                if group.kind is AmountKind.DEVICE:
                    report.devices.add(amounts)
                    continue
                report.total.add(amounts)
                report.rows.setdefault(_shown(group, by), Amounts()).add(amounts)
        except (sqlite3.Error, ValueError, TypeError, OverflowError) as error:  # SQLite keeps any value in any column
            raise unusable(path, error) from error
    return report


def _open(path: Path) -> sqlite3.Connection:
    try:
        path.stat()
    except FileNotFoundError as error:
        raise SetupError(
            f"no usage ledger at {path}: the agent writes it (gpuwarden run --usage {path}); "
            "if it writes another one, name that with --usage FILE"
        ) from error
    except OSError as error:
        raise unusable(path, error) from error
    if not os.access(path, os.R_OK):
        raise SetupError(f"may not read the usage ledger {path}: run as root or as its group")
    # Without an agent there is no log beside the file, and a user who may not write there could not make one.
    alone = not Path(f"{path}-wal").exists() and not os.access(path.parent, os.W_OK)
    uri = f"{path.absolute().as_uri()}?mode=ro{'&immutable=1' if alone else ''}"
    try:
        return sqlite3.connect(uri, uri=True, timeout=5.0, isolation_level=None)
    except sqlite3.Error as error:
        raise unusable(path, error) from error


def _hours(db: sqlite3.Connection, since: int, until: int) -> tuple[int | None, int | None]:
    query = "SELECT min(hour), max(hour) FROM usage WHERE hour >= ? AND hour < ?"
    first, last = db.execute(query, (since, until)).fetchone()
    return first, last


def _dropped(db: sqlite3.Connection) -> int:
    row = db.execute("SELECT value FROM note WHERE name = 'dropped_rows'").fetchone()
    return int(row[0]) if row else 0


def _sums(db: sqlite3.Connection, since: int, until: int, by: Sequence[By]) -> Iterator[tuple[Group, Amounts]]:
    """Per owner and device; what is beyond that is added up by the caller, whose integers have no bound.

    SQLite's have: a sum beyond 63 bits would end the report, so it adds up the halves.
    """
    query = _SUMS.format(hour="hour" if By.HOUR in by else "NULL")
    for kind, *rest in db.execute(query, (since, until)):
        names, (sm, memory, *halves) = rest[:8], rest[8:]
        integers = [(high << 32) + low for high, low in zip(halves[::2], halves[1::2], strict=True)]
        yield Group(AmountKind(kind), *names), Amounts(sm, memory, *integers)


def _shown(group: Group, by: Sequence[By]) -> Group:
    """The group without what the report is not grouped by."""
    shown = {name: getattr(group, name) for one in by for name in _SHOWN[one]}
    owners = {By.CONTAINER, By.POD, By.NAMESPACE, By.IMAGE}.intersection(by)
    return Group(group.kind if owners else None, **shown)
