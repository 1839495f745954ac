# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What several parts of the agent add to: counters of losses, and listeners. Nothing is patched from outside.

Invariants: a part that raises hides nothing of the others, and its failures are counted; closing a registration takes
the part out again, once. For any thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Generic, Self, TypeVar

_log = logging.getLogger(__name__)
T = TypeVar("T")
LossSource = Callable[[], Mapping[str, int]]  # "source:reason" → count


class Registration:
    """A context manager: the end of the block unregisters."""

    def __init__(self, remove: Callable[[], object]) -> None:
        self._remove = remove

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unregisters; harmless the second time."""
        self._remove()


class _Entries(Generic[T]):
    """What is registered, in the order of registration."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._entries: dict[object, T] = {}

    def add(self, entry: T) -> Registration:
        key = object()
        with self._mutex:
            self._entries[key] = entry
        return Registration(lambda: self._remove(key))

    def all(self) -> list[T]:
        with self._mutex:
            return list(self._entries.values())

    def _remove(self, key: object) -> None:
        with self._mutex:
            self._entries.pop(key, None)


class _Source:
    """A source with its name and its last counts."""

    def __init__(self, name: str, read: LossSource) -> None:
        self.name, self.read = name, read
        self.last: Mapping[str, int] = {}


class LossRegistry:
    """Counts of what was lost or failed, by parts that come and go. Equal keys of several sources are added up."""

    def __init__(self) -> None:
        self._sources: _Entries[_Source] = _Entries()
        self._failures: dict[str, int] = {}  # by name; bounded, as names are written in the code

    def register(self, name: str, source: LossSource) -> Registration:
        """`source` is read at each `counts`, on the reader's thread. Its counts go when the registration is closed."""
        return self._sources.add(_Source(name, source))

    def counts(self) -> dict[str, int]:
        """The counts of all sources now; of one that raises, those read last: a counter does not go backwards."""
        counts: dict[str, int] = {}
        for source in self._sources.all():
            for key, count in self._read(source).items():
                counts[key] = counts.get(key, 0) + count
        return counts

    def failures(self) -> dict[str, int]:
        """How often each source could not be read, as counts: "name:unread_losses"."""
        return {f"{name}:unread_losses": count for name, count in list(self._failures.items())}

    def _read(self, source: _Source) -> Mapping[str, int]:
        try:
            source.last = source.read()
        except Exception:  # noqa: BLE001  # what one part cannot count must not hide what the others lost
            if source.name not in self._failures:
                _log.exception("the losses of %s could not be read; further failures are only counted", source.name)
            self._failures[source.name] = self._failures.get(source.name, 0) + 1
        return source.last


class Listeners(Generic[T]):
    """Callables that get each new value, on the thread that notifies."""

    def __init__(self) -> None:
        self._listeners: _Entries[Callable[[T], None]] = _Entries()
        self.failures = 0  # calls that raised

    def register(self, listener: Callable[[T], None]) -> Registration:
        """`listener` is called with every value from now on."""
        return self._listeners.add(listener)

    def notify(self, value: T) -> None:
        """Calls each listener, in the order of registration."""
        for listener in self._listeners.all():
            try:
                listener(value)
            except Exception:  # noqa: BLE001  # a listener must not stop the notifier
                if not self.failures:
                    _log.exception("a listener failed; further failures are only counted")
                self.failures += 1
