# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Takes every tick's increments and writes them to the file now and then, on a thread of its own.

Invariants: the observing thread never waits for the disk; nothing is written twice; what a write that failed was to
hold is kept and tried again. Bounded: when rows wait that no write takes, further owners are dropped, and counted.
SIGKILL loses what was not flushed: at most the last `flush_seconds`.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol, Self

from agent.clock import wall_ns
from agent.errors import SetupError, UsageError
from agent.model import Container, Device, Snapshot
from agent.usage.amounts import SECONDS_PER_HOUR, Amounts, Row, hour_of
from agent.usage.meter import Meter
from agent.usage.store import MOST_ROWS, Batch, Store
from agent.usage.tables import DAYS

_log = logging.getLogger(__name__)
FLUSH_SECONDS: Final = 10.0
MOST_WAITING: Final = 100_000  # rows: a day of 100 containers on 8 devices with the disk full is 19,200


class Ledger:
    """A context manager: leaving it writes the rest. SetupError when the file cannot be used."""

    def __init__(
        self,
        path: Path,
        days: int = DAYS,
        flush_seconds: float = FLUSH_SECONDS,
        most_rows: int = MOST_ROWS,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self._store = Store(path, most_rows)
        self._path, self._days, self._flush_seconds = path, days, flush_seconds
        self._most_rows, self._most_waiting = most_rows, most_waiting
        self._meter = Meter()
        self._lock = threading.Lock()
        self._rows: dict[Row, Amounts] = {}
        self._containers: dict[str, Container] = {}  # of the newest snapshot
        self._renamed: dict[str, Container] = {}  # names that the file does not have yet
        self._devices: dict[str, Device] = {}
        self._pruned_hour: int | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._failing = False
        self._failed_writes = self._dropped_rows = self._dropped_amounts = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()
        self._store.close()

    def record(self, snapshot: Snapshot) -> None:
        """Books one tick; called by the observing thread for each. A tick belongs to the hour in which it ended."""
        hour = hour_of(snapshot.wall_ns)
        with self._lock:
            for booking, amounts in self._meter.read(snapshot):
                self._add(Row(hour, booking), amounts)
            self._note_names(snapshot)
            for reading in snapshot.devices:
                self._devices[reading.device.uuid] = reading.device

    def losses(self) -> dict[str, int]:
        """What went wrong since the start, as Snapshot.lost has it."""
        return {
            "usage:failed_writes": self._failed_writes,
            "usage:dropped_rows": self._dropped_rows,  # of the oldest hours, by the bound on rows
            "usage:dropped_amounts": self._dropped_amounts,  # waited for a write when there was no room
            "usage:forgotten_totals": self._meter.forgotten,
        }

    def flush(self) -> bool:
        """Writes what waits; false when that failed and it goes on waiting."""
        batch = self._take()
        try:
            if self._store.is_moved():
                self._reopen()
            self._store.add(batch)
        except (sqlite3.Error, OSError, SetupError, OverflowError) as error:  # the last: beyond SQLite's 63 bits
            self._take_back(batch, error)
            return False
        try:
            self._prune()
        except sqlite3.Error as error:  # the batch is written: only pruning is tried again
            self._failed(error)
            return False
        if self._failing:
            _log.warning("the usage ledger %s is written again", self._path)
        self._failing = False
        return True

    def _run(self) -> None:
        while not self._ending.wait(self._flush_seconds):
            self.flush()
        if not self.flush():
            _log.error("the usage ledger %s lacks the use since its last write", self._path)

    def _add(self, row: Row, amounts: Amounts) -> None:
        sums = self._rows.get(row)
        if sums is not None:
            sums.add(amounts)
        elif len(self._rows) < self._most_waiting:
            self._rows[row] = amounts
        else:
            self._dropped_amounts += 1

    def _note_names(self, snapshot: Snapshot) -> None:
        """Names may come later than the first rows: pods are looked up while the container already works."""
        known, self._containers = self._containers, {}
        for used in (*snapshot.containers, *snapshot.ended):
            container = used.container
            self._containers[container.key] = container
            before = known.get(container.key)
            if before is not container and before != container and len(self._renamed) < self._most_waiting:
                self._renamed[container.key] = container

    def _take(self) -> Batch:
        """What waits. Whoever has rows is named again: pruning may have forgotten an owner that had none for long."""
        with self._lock:
            rows, devices, names = self._rows, self._devices, self._renamed
            for row in rows:
                container = self._containers.get(row.booking.owner)
                if container is not None:
                    names[container.key] = container
            self._rows, self._devices, self._renamed = {}, {}, {}
        return Batch(rows, names, devices)

    def _take_back(self, batch: Batch, error: Exception) -> None:
        self._failed(error)
        with self._lock:
            newer, self._rows = self._rows, dict(batch.rows)
            for row, amounts in newer.items():
                self._add(row, amounts)
            self._renamed = {**batch.containers, **self._renamed}
            self._devices = {**batch.devices, **self._devices}

    def _failed(self, error: Exception) -> None:
        self._failed_writes += 1
        if not self._failing:
            _log.warning("the usage ledger %s cannot be written, trying again: %s", self._path, error)
        self._failing = True

    def _reopen(self) -> None:
        store = Store(self._path, self._most_rows)
        self._store.close()
        self._store, self._pruned_hour = store, None

    def _prune(self) -> None:
        hour = hour_of(wall_ns())
        if hour == self._pruned_hour:
            return
        self._dropped_rows += self._store.prune(hour - self._days * 24 * SECONDS_PER_HOUR)
        self._pruned_hour = hour


class Source(Protocol):
    """Who ticks: the observer."""

    on_tick: list[Callable[[Snapshot], None]]
    losses: Callable[[], Mapping[str, int]]


def keep(source: Source, file: str, days: int, until: ExitStack) -> None:
    """Books every tick of the source. A file that cannot be had is a warning: observing goes on without a ledger."""
    if not 1 <= days <= 36_500:
        raise UsageError(f"--usage-days {days}: give days between 1 and 36500")
    if file == "off":
        return
    try:
        ledger = until.enter_context(Ledger(Path(file), days))
    except SetupError as error:
        _log.warning("no usage ledger is kept: %s", error)
        source.losses = lambda: {"usage:unusable_file": 1}
        return
    source.losses = ledger.losses
    source.on_tick.append(ledger.record)
    _log.info("usage ledger in %s: gpuwarden report reads it", file)
