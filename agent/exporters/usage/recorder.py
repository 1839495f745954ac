# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Records what every tick used, and writes it to the ledger's file now and then, on a thread of its own.

Snapshots have totals since the agent started; a row has what was used in its hour. Invariants: what a total grew by is
recorded exactly once, and written exactly once; a write that failed is retried with what it was to hold; the observing
thread never waits for the disk. Bounded: when rows wait that no write takes, further owners are dropped, and counted.
SIGKILL loses what was not flushed: at most the last `flush_seconds`.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol, Self

from agent.core.clock import NS_PER_SECOND, wall_ns
from agent.core.errors import SetupError, UsageError
from agent.core.model import Container, ContainerUsage, Device, Snapshot, Totals
from agent.core.registry import Listeners, LossRegistry
from agent.core.worker import Worker
from agent.exporters.usage.amounts import AmountKind, Amounts, UsageKey, UsageRow, hour_of
from agent.exporters.usage.store import DAYS, MAX_ROWS, Store, UsageBatch

_MAX_TOTALS: Final = 50_000


class Meter:
    """What totals grew by between two snapshots. No I/O, no clock.

    A total never seen before counts from 0. One that fell began anew, and so did that of a container which was among
    the ended and then left the snapshot. One that is absent for a while (its device does not answer) goes on where it
    was. Beyond `max_totals` the longest absent is dropped; `forgotten` counts these.
    """

    def __init__(self, max_totals: int = _MAX_TOTALS) -> None:
        self._max_totals = max_totals
        self._last: OrderedDict[UsageKey, Totals] = OrderedDict()
        self._ended: dict[str, ContainerUsage] = {}
        self.forgotten = 0

    def read(self, snapshot: Snapshot) -> Iterator[tuple[UsageKey, Amounts]]:
        """What was used since the previous snapshot, where that is not 0."""
        seconds = snapshot.interval_ns / NS_PER_SECOND
        self._forget_ended(snapshot)
        for use, totals, memory_bytes in self._owners(snapshot):
            amounts = self._grown(use, totals)
            if memory_bytes:
                amounts.memory_byte_seconds = memory_bytes * seconds
            if amounts:
                yield use, amounts
        while len(self._last) > self._max_totals:
            self._last.popitem(last=False)
            self.forgotten += 1

    def _owners(self, snapshot: Snapshot) -> Iterator[tuple[UsageKey, Totals, int | None]]:
        for used in snapshot.containers:
            for usage in used.usage:
                yield UsageKey(AmountKind.CONTAINER, used.container.key, usage.device), usage.totals, usage.memory_bytes
        for ended in _ended(snapshot):
            if self._ended.get(ended.container.key) is ended:
                continue  # recorded when it ended
            self._ended[ended.container.key] = ended
            for usage in ended.usage:
                yield UsageKey(AmountKind.CONTAINER, ended.container.key, usage.device), usage.totals, None
        for rest in snapshot.unattributed:
            yield UsageKey(AmountKind.UNATTRIBUTED, "", rest.device), rest.totals, rest.memory_bytes
        for reading in snapshot.devices:
            totals = snapshot.device_totals.get(reading.device.uuid, Totals())
            yield UsageKey(AmountKind.DEVICE, "", reading.device.uuid), totals, reading.memory_used_bytes

    def _grown(self, use: UsageKey, now: Totals) -> Amounts:
        before = self._last.get(use)
        self._last[use] = now
        self._last.move_to_end(use)
        if before is None or _fell(before, now):
            return Amounts(now.sm_seconds, 0.0, now.pcie_tx_bytes, now.pcie_rx_bytes, now.launches)
        return Amounts(
            now.sm_seconds - before.sm_seconds,
            0.0,
            now.pcie_tx_bytes - before.pcie_tx_bytes,
            now.pcie_rx_bytes - before.pcie_rx_bytes,
            now.launches - before.launches,
        )

    def _forget_ended(self, snapshot: Snapshot) -> None:
        """A container that left the list of the ended has no totals any more, unless it lives again and goes on."""
        if not self._ended:
            return
        kept = {ended.container.key for ended in _ended(snapshot)}
        living = {used.container.key for used in snapshot.containers}
        for key in [key for key in self._ended if key not in kept]:
            ended = self._ended.pop(key)
            for usage in () if key in living else ended.usage:
                self._last.pop(UsageKey(AmountKind.CONTAINER, key, usage.device), None)


def _ended(snapshot: Snapshot) -> tuple[ContainerUsage, ...]:
    ended: tuple[ContainerUsage, ...] = snapshot.ended
    return ended


def _fell(before: Totals, now: Totals) -> bool:
    return (
        now.sm_seconds < before.sm_seconds
        or now.launches < before.launches
        or now.pcie_tx_bytes < before.pcie_tx_bytes
        or now.pcie_rx_bytes < before.pcie_rx_bytes
    )


_log = logging.getLogger(__name__)
FLUSH_SECONDS: Final = 10.0
MAX_WAITING: Final = 100_000  # rows: a day of 100 containers on 8 devices with the disk full is 19,200


class PendingUsage:
    """What was recorded and is not written yet, and the names of its owners. For any thread."""

    def __init__(self, max_waiting: int) -> None:
        self.dropped_amounts = 0  # waited for a write when there was no room
        self.cut_amounts = 0  # were more than a row can have
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._rows: dict[UsageRow, Amounts] = {}
        self._containers: dict[str, Container] = {}  # of the newest snapshot
        self._renamed: dict[str, Container] = {}  # names that the file does not have yet
        self._devices: dict[str, Device] = {}

    def add(self, snapshot: Snapshot, used: Iterable[tuple[UsageKey, Amounts]]) -> None:
        """One tick, which belongs to the hour in which it ended."""
        hour = hour_of(snapshot.wall_ns)
        with self._lock:
            for use, amounts in used:
                self.cut_amounts += amounts.cut()
                self._add(UsageRow(hour, use), amounts)
            self._note_names(snapshot)
            for reading in snapshot.devices:
                self._devices[reading.device.uuid] = reading.device

    def take(self) -> UsageBatch:
        """What waits. Owners of rows are named again: pruning may have deleted one that had no rows for long."""
        with self._lock:
            rows, devices, names = self._rows, self._devices, self._renamed
            for row in rows:
                container = self._containers.get(row.use.owner)
                if container is not None:
                    names[container.key] = container
            self._rows, self._devices, self._renamed = {}, {}, {}
        return UsageBatch(rows, names, devices)

    def put_back(self, batch: UsageBatch) -> None:
        """A batch that was not written waits again, before what was recorded meanwhile."""
        with self._lock:
            newer, self._rows = self._rows, dict(batch.rows)
            for row, amounts in newer.items():
                self._add(row, amounts)
            self._renamed = {**batch.containers, **self._renamed}
            self._devices = {**batch.devices, **self._devices}

    def _add(self, row: UsageRow, amounts: Amounts) -> None:
        sums = self._rows.get(row)
        if sums is not None:
            sums.add(amounts)
        elif len(self._rows) < self._max_waiting:
            self._rows[row] = amounts
        else:
            self.dropped_amounts += 1

    def _note_names(self, snapshot: Snapshot) -> None:
        """Names may come later than the first rows: pods are looked up while the container already works."""
        known, self._containers = self._containers, {}
        for used in (*snapshot.containers, *snapshot.ended):
            container = used.container
            self._containers[container.key] = container
            before = known.get(container.key)
            if before is not container and before != container and len(self._renamed) < self._max_waiting:
                self._renamed[container.key] = container


class UsageRecorder:
    """A context manager: leaving it writes the rest. SetupError when the file cannot be used."""

    def __init__(
        self,
        path: Path,
        days: int = DAYS,
        flush_seconds: float = FLUSH_SECONDS,
        max_rows: int = MAX_ROWS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._store = Store(path, max_rows)
        self._path, self._days, self._max_rows = path, days, max_rows
        self._flush_seconds = flush_seconds
        self._meter, self._pending = Meter(), PendingUsage(max_waiting)
        self._pruned_hour: int | None = None
        self._failing = False
        self._failed_writes = self._dropped_rows = 0
        self._worker = Worker(
            "usage", self._step, failed="a write", first_seconds=flush_seconds, retry_seconds=flush_seconds
        )

    def __enter__(self) -> Self:
        self._worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()
        try:
            if not self.flush():
                _log.error("the usage ledger %s lacks the use since its last write", self._path)
        finally:
            self._store.close()

    def record(self, snapshot: Snapshot) -> None:
        """Records one tick; called by the observing thread for each."""
        self._pending.add(snapshot, self._meter.read(snapshot))

    def losses(self) -> dict[str, int]:
        """What was lost since the start, as Snapshot.lost has it."""
        return {
            "usage:failed_writes": self._failed_writes,
            "usage:dropped_rows": self._dropped_rows,  # of the oldest hours, by the bound on rows
            "usage:dropped_amounts": self._pending.dropped_amounts,
            "usage:forgotten_totals": self._meter.forgotten,
            "usage:cut_amounts": self._pending.cut_amounts,
        }

    def flush(self) -> bool:
        """Writes what waits; false when that failed and it goes on waiting."""
        batch = self._pending.take()
        try:
            if self._store.is_moved():
                self._reopen()
            self._store.add(batch)
        except (sqlite3.Error, OSError, SetupError, OverflowError) as error:  # the last: beyond SQLite's 63 bits
            self._failed(error)
            self._pending.put_back(batch)
            return False
        try:
            self._prune()
        except sqlite3.Error as error:  # the batch is written: only pruning is retried
            self._failed(error)
            return False
        if self._failing:
            _log.warning("the usage ledger %s is written again", self._path)
        self._failing = False
        return True

    def _step(self) -> float:
        self.flush()
        return self._flush_seconds

    def _failed(self, error: Exception) -> None:
        self._failed_writes += 1
        if not self._failing:
            _log.warning("the usage ledger %s cannot be written, trying again: %s", self._path, error)
        self._failing = True

    def _reopen(self) -> None:
        store = Store(self._path, self._max_rows)
        self._store.close()
        self._store, self._pruned_hour = store, None

    def _prune(self) -> None:
        hour = hour_of(wall_ns())
        if hour == self._pruned_hour:
            return
        self._dropped_rows += self._store.prune(hour, self._days * 24)
        self._pruned_hour = hour


class TickSource(Protocol):
    """What ticks: the observer."""

    listeners: Listeners[Snapshot]
    losses: LossRegistry


def keep(source: TickSource, file: str, days: int, until: ExitStack) -> None:
    """Records every tick of the source. A file that cannot be used is a warning: observing goes on without a ledger."""
    if not 1 <= days <= 36_500:
        raise UsageError(f"--usage-days {days}: give days between 1 and 36500")
    if file == "off":
        return
    try:
        ledger = until.enter_context(UsageRecorder(Path(file), days))
    except SetupError as error:
        _log.warning("no usage ledger is kept: %s", error)
        source.losses.register("usage", lambda: {"usage:unusable_file": 1})
        return
    source.losses.register("usage", ledger.losses)
    source.listeners.register(ledger.record)
    _log.info("usage ledger in %s: gpuwarden report reads it", file)
