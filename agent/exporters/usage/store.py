# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Writes the usage ledger's file: SQLite, one row per hour, owner and device.

Invariants: amounts are added, so that an agent started again in mid-hour goes on with the same row; the newest names of
an owner win; a batch is written whole or not at all; the file keeps `max_rows` at most; what is old is decided by the
order in which hours were written, so no step of the clock deletes anything. The write-ahead log lets other
processes read meanwhile, and survives SIGKILL and power cuts (these may cost the last commits, never older ones). A
file of an older version is migrated when it is opened: user_version counts the migrations that it has seen, and
application_id distinguishes it from another program's database.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.core.errors import SetupError
from agent.core.model import Container, Device
from agent.exporters.usage.amounts import MOST, AmountKind, Amounts, UsageRow

DEFAULT_FILE: Final = Path("/var/lib/gpuwarden/usage.sqlite")
DAYS: Final = 90  # how long rows are kept
APPLICATION_ID: Final = 0x67707577  # "gpuw"

MIGRATIONS: Final = (  # one that was released never changes: add another
    (
        "CREATE TABLE owner (id INTEGER PRIMARY KEY, kind TEXT NOT NULL, key TEXT NOT NULL, name TEXT, pod TEXT,"
        " namespace TEXT, image TEXT, runtime TEXT, UNIQUE (kind, key))",
        "CREATE TABLE device (id INTEGER PRIMARY KEY, uuid TEXT NOT NULL UNIQUE, number INTEGER, name TEXT)",
        "CREATE TABLE usage (hour INTEGER NOT NULL, owner INTEGER NOT NULL, device INTEGER NOT NULL,"
        " sm_seconds REAL NOT NULL, memory_byte_seconds REAL NOT NULL, pcie_tx_bytes INTEGER NOT NULL,"
        " pcie_rx_bytes INTEGER NOT NULL, launches INTEGER NOT NULL, PRIMARY KEY (hour, owner, device)) WITHOUT ROWID",
        "CREATE INDEX usage_owner ON usage (owner)",  # for finding the owners that no row names any more
        "CREATE TABLE note (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    ),
    (
        "CREATE TABLE recorded (sequence INTEGER PRIMARY KEY, hour INTEGER NOT NULL UNIQUE)",  # hours, as they came
        "INSERT INTO recorded (hour) SELECT DISTINCT hour FROM usage ORDER BY hour",
    ),
)


def check_version(db: sqlite3.Connection, path: Path) -> int:
    """The file's version; 0 for an empty one. SetupError where it is not a file for us."""
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if not tables:
        return 0
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID:
        raise SetupError(f"{path} is another program's database: name another file with --usage FILE")
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise SetupError(
            f"{path} was written by a newer gpuwarden (file version {version}, this one reads {len(MIGRATIONS)}): "
            "install that again, or move the file away, and a new one is started"
        )
    return int(version)


def unusable(path: Path, error: Exception) -> SetupError:
    """What to do about a file that SQLite cannot use."""
    if isinstance(error, PermissionError):
        return SetupError(f"may not use the usage ledger {path}: run as root or as its group, or give --usage FILE")
    is_damaged = isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError)
    if is_damaged or isinstance(error, ValueError | TypeError | OverflowError):
        return SetupError(f"{path} is no usage ledger ({error}): move it away, and a new one is started")
    return SetupError(f"cannot use the usage ledger {path} ({error}): name a file that can be had with --usage FILE")


MAX_ROWS: Final = 2_000_000  # 100 containers on 8 devices each fill that in 104 days
_LONGEST_TEXT: Final = 1024
_ADD_OWNER: Final = "INSERT OR IGNORE INTO owner (kind, key) VALUES (?, ?)"
_ADD_DEVICE: Final = "INSERT OR IGNORE INTO device (uuid) VALUES (?)"

_NAME_OWNER: Final = """
    INSERT INTO owner (kind, key, name, pod, namespace, image, runtime) VALUES (?, ?, ?, ?, ?, ?, ?)
    ON CONFLICT (kind, key) DO UPDATE SET name = excluded.name, runtime = excluded.runtime,
        pod = coalesce(excluded.pod, pod), namespace = coalesce(excluded.namespace, namespace),
        image = coalesce(excluded.image, image)
"""

_NAME_DEVICE: Final = """
    INSERT INTO device (uuid, number, name) VALUES (?, ?, ?)
    ON CONFLICT (uuid) DO UPDATE SET number = excluded.number, name = excluded.name
"""

_ADD_USAGE: Final = f"""
    INSERT INTO usage VALUES (?, (SELECT id FROM owner WHERE kind = ? AND key = ?),
        (SELECT id FROM device WHERE uuid = ?), ?, ?, ?, ?, ?)
    ON CONFLICT DO UPDATE SET sm_seconds = sm_seconds + excluded.sm_seconds,
        memory_byte_seconds = memory_byte_seconds + excluded.memory_byte_seconds,
        pcie_tx_bytes = min({MOST}, pcie_tx_bytes + excluded.pcie_tx_bytes),
        pcie_rx_bytes = min({MOST}, pcie_rx_bytes + excluded.pcie_rx_bytes),
        launches = min({MOST}, launches + excluded.launches)
"""
_ADD_HOUR: Final = "INSERT OR IGNORE INTO recorded (hour) VALUES (?)"
_DROP_HOURS: Final = "DELETE FROM recorded WHERE sequence <= (SELECT max(sequence) FROM recorded) - ?"
# Whole hours go, so that an hour that is still there adds up.
_DROP_OLDEST: Final = """
    DELETE FROM recorded WHERE hour IN (SELECT hour FROM (
        SELECT hour, sum(rows) OVER (ORDER BY sequence DESC) AS with_newer
        FROM recorded JOIN (SELECT hour, count(*) AS rows FROM usage GROUP BY hour) USING (hour)) WHERE with_newer > ?)
"""
_DROP_ROWS: Final = "DELETE FROM usage WHERE hour NOT IN (SELECT hour FROM recorded)"
_ADD_NOTE: Final = "INSERT INTO note VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value"


@dataclass(frozen=True, slots=True)
class UsageBatch:
    """What one flush writes: rows, and the names of their owners and devices as far as these are known."""

    rows: Mapping[UsageRow, Amounts]
    containers: Mapping[str, Container]
    devices: Mapping[str, Device]


class Store:
    """Used by one thread at a time. SetupError: it cannot be opened; sqlite3.Error: it cannot be written now."""

    def __init__(self, path: Path, max_rows: int = MAX_ROWS) -> None:
        self._path, self._max_rows = path, max_rows
        try:
            _create(path)
            self._db = sqlite3.connect(path, timeout=5.0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise unusable(path, error) from error
        try:
            self._prepare(path)
        except (SetupError, sqlite3.Error) as error:
            self._db.close()
            raise error if isinstance(error, SetupError) else unusable(path, error) from error
        self._inode = os.stat(path).st_ino

    def close(self) -> None:
        """Folds the write-ahead log into the file."""
        self._db.close()

    def is_moved(self) -> bool:
        """Whether the file was moved away or deleted: what is written now would be lost."""
        try:
            return os.stat(self._path).st_ino != self._inode
        except FileNotFoundError:
            return True

    def add(self, batch: UsageBatch) -> None:
        """Adds everything, or nothing and raises sqlite3.Error."""
        with self._transaction():
            self._db.executemany(_NAME_OWNER, map(_owner, batch.containers.values()))
            self._db.executemany(_NAME_DEVICE, ((d.uuid, d.index, _text(d.name)) for d in batch.devices.values()))
            uses = {row.use for row in batch.rows}
            self._db.executemany(_ADD_OWNER, {(use.kind, _text(use.owner)) for use in uses})
            self._db.executemany(_ADD_DEVICE, {(use.device,) for use in uses})
            self._db.executemany(_ADD_HOUR, sorted({(row.hour,) for row in batch.rows}))
            self._db.executemany(_ADD_USAGE, (_values(row, amounts) for row, amounts in batch.rows.items()))

    def prune(self, hour: int, kept_hours: int) -> int:
        """Deletes all but so many hours, the last to come, then the oldest of them until the rows fit.

        `hour`: the one that it is; it counts as one, whether or not anything was used. Returns how many rows the bound
        on rows cost.
        """
        with self._transaction():
            self._db.execute(_ADD_HOUR, (hour,))
            self._db.execute(_DROP_HOURS, (kept_hours,))
            self._db.execute(_DROP_ROWS)
            self._db.execute(_DROP_OLDEST, (self._max_rows,))
            dropped = self._db.execute(_DROP_ROWS).rowcount
            if dropped:
                self._db.execute(_ADD_NOTE, ("dropped_rows", dropped))
            self._db.execute("DELETE FROM owner WHERE NOT EXISTS (SELECT 1 FROM usage WHERE owner = owner.id)")
        self._db.execute("PRAGMA incremental_vacuum").fetchall()
        return dropped

    def _prepare(self, path: Path) -> None:
        if not check_version(self._db, path):
            self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # pruned pages go back to the file system
        (mode,) = self._db.execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise SetupError(f"{path}: its file system keeps no write-ahead log: name a local file with --usage FILE")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA journal_size_limit = 4194304").fetchone()
        with self._transaction():
            for step in MIGRATIONS[check_version(self._db, path) :]:
                for statement in step:
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            self._db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:  # some errors (a full disk) end it by themselves
                self._db.execute("ROLLBACK")
            raise


def _create(path: Path) -> None:
    """The directory and the file, so that it, and the log that SQLite puts beside it, are ours and the group's."""
    path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    try:
        if os.fstat(descriptor).st_size == 0:
            os.fchmod(descriptor, 0o640)  # whatever the umask says
    finally:
        os.close(descriptor)


def _owner(container: Container) -> tuple[str | None, ...]:
    return (AmountKind.CONTAINER, *map(_text, (container.key, container.name, container.pod, container.namespace)),
            _text(container.image), container.runtime)  # fmt: skip


def _values(row: UsageRow, amounts: Amounts) -> tuple[int | float | str | None, ...]:
    kind, owner, device = row.use
    sums = (amounts.sm_seconds, amounts.memory_byte_seconds)
    integers = (amounts.pcie_tx_bytes, amounts.pcie_rx_bytes, amounts.launches)
    return (row.hour, kind, _text(owner), device, *sums, *(min(one, MOST) for one in integers))


def _text(name: str | None) -> str | None:
    """A name from outside as SQLite can store it: bytes that were no UTF-8 are written as escapes."""
    return None if name is None else name[:_LONGEST_TEXT].encode("utf-8", "backslashreplace").decode()
