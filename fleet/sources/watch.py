# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The API server's pods, listed once and then watched; listed again where the watch is too old or anything failed.

Invariant: the listener hears of each change in its order, or of the whole list instead; and for as long as the API
server does not answer it knows why. A watch is renewed twice a minute, so that a server that has silently gone is
noticed by then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Final, Protocol

from fleet.model import FleetError
from fleet.sources.kubernetes import GoneError, KubernetesApi

WATCH_S: Final = 30.0
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 8.0


class Listener(Protocol):
    """Whom the pods are for."""

    def listed(self, pods: Iterable[Any], asked_s: float) -> None: ...
    def changed(self, kind: str, pod: Any) -> None: ...
    def trouble(self, source: str, reason: str | None) -> None: ...


def follow(api: KubernetesApi, listener: Listener, stop: threading.Event) -> None:
    """Until `stop` is set."""
    pause_s = _FIRST_PAUSE_S
    while not stop.is_set():
        try:
            asked_s = time.monotonic()
            listing = api.list_pods()
            listener.listed(listing.pods, asked_s)
            pause_s = _FIRST_PAUSE_S
            _watch(api, listener, listing.version, stop)
        except GoneError:
            stop.wait(0.1)  # a server that forgets at once is not asked without a pause
        except FleetError as error:
            listener.trouble("kubernetes", str(error))
            stop.wait(pause_s)
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)


def _watch(api: KubernetesApi, listener: Listener, version: str, stop: threading.Event) -> None:
    while not stop.is_set():
        begun_s = time.monotonic()
        for change in api.watch_pods(version, WATCH_S):
            if stop.is_set():
                return
            if change.kind in ("ADDED", "MODIFIED", "DELETED"):
                listener.changed(change.kind, change.pod)
            version = change.version or version
        if time.monotonic() - begun_s < 1.0:
            stop.wait(0.2)  # it ended at once
