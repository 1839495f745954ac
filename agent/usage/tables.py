# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The tables of the ledger's file, and how a file of an older version becomes one of this.

user_version says how many of the migrations a file has seen; application_id tells it from another program's database.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from agent.errors import SetupError

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
            "install that again, or move the file away and a new one is begun"
        )
    return int(version)


def unusable(path: Path, error: Exception) -> SetupError:
    """What to do about a file that SQLite will not have."""
    if isinstance(error, PermissionError):
        return SetupError(f"may not use the usage ledger {path}: run as root or as its group, or give --usage FILE")
    if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
        return SetupError(f"{path} is no usage ledger ({error}): move it away and a new one is begun")
    return SetupError(f"cannot use the usage ledger {path} ({error}): name a file that can be had with --usage FILE")
