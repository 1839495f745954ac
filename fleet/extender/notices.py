# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What is written to the API server beside bindings: Events for people, and marks that wake a refused pod.

Invariant: nothing waits for it. It is written by one thread from a bounded queue; what does not fit, or fails, is
counted and dropped.

kube-scheduler asks again for a pod that it found no node for when something in the cluster changes, else after a minute
or five. A new plan changes nothing that it sees, so the plan's name is written on the pod: that is a change.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from fleet.extender.bind import PLAN
from fleet.extender.protocol import BindRequest
from fleet.extender.reservations import Holder
from fleet.extender.state import Decision
from fleet.model import FleetError
from fleet.sources.kubernetes import KubernetesApi

MOST: Final = 4096
"""In the queue"""


class Notices:
    """Put from any thread."""

    def __init__(self, api: KubernetesApi, dropped: Callable[[], None]) -> None:
        self._api, self._dropped = api, dropped
        self._queue: queue.Queue[Callable[[], object]] = queue.Queue(MOST)

    def placed(self, asked: BindRequest, decision: Decision, now_s: float) -> None:
        """An Event on a pod that was bound. `now_s`: since 1970."""
        event = placed_event(asked, decision, now_s)
        self._put(partial(self._api.record, asked.namespace, event))

    def wake(self, pods: Iterable[Holder], plan: str) -> None:
        """The plan has a GPU for them."""
        for pod in pods:
            namespace, _, name = pod.key.partition("/")
            metadata = {"uid": pod.uid, "annotations": {PLAN: plan}}
            self._put(partial(self._api.annotate, namespace, name, metadata))

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set."""
        while not stop.is_set():
            try:
                write = self._queue.get(timeout=0.5)
            except queue.Empty:
                continue
            try:
                write()
            except FleetError:
                self._dropped()

    def _put(self, write: Callable[[], object]) -> None:
        try:
            self._queue.put_nowait(write)
        except queue.Full:
            self._dropped()


def placed_event(asked: BindRequest, decision: Decision, now_s: float) -> Mapping[str, Any]:
    """The document of an Event."""
    beside = f"beside {decision.online}" if decision.online else "with no online service on it"
    expected = ""
    if decision.candidate is not None:
        expected = f"; expected throughput {decision.candidate.throughput:.2f} of alone"
    now = datetime.fromtimestamp(now_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{asked.name[:200]}.", "namespace": asked.namespace},
        "involvedObject": {
            "apiVersion": "v1",
            "kind": "Pod",
            "namespace": asked.namespace,
            "name": asked.name,
            "uid": asked.uid,
        },
        "type": "Normal",
        "reason": "GPUAssigned",
        "message": f"{decision.reservation.gpu} on {asked.node}, {beside}{expected} (plan {decision.plan})",
        "source": {"component": "gpuwarden-fleet"},
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
