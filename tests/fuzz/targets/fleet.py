# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the fleet reads: traces, Prometheus' answers, the API server's, and the questions of the scheduler."""

from __future__ import annotations

import io
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

from fleet.extender.protocol import View, bind_request, filter_result, prioritize_result, question
from fleet.extender.reservations import Reservations, holder
from fleet.model import FleetError, TraceJob
from fleet.sources import kubernetes, pods, prometheus
from fleet.traces import FORMATS
from tests.fuzz.target import Target, answers, require


def trace(data: bytes) -> None:
    """A trace; the first line of the input is its format."""
    name, _, rest = data.partition(b"\n")
    wanted = FORMATS.get(name.decode("latin-1").strip())
    if wanted is None:
        return
    dropped: Counter[str] = Counter()
    with suppress(FleetError):
        for job in wanted.read(io.StringIO(rest.decode("utf-8", "replace"), newline=""), dropped):
            require(all(map(math.isfinite, _numbers(job))), "a time that is no number")
    require(all(reason.isprintable() and len(reason) < 100 for reason in dropped), "a reason that depends on the row")


def _numbers(job: TraceJob) -> Iterator[float]:
    yield from (job.submit_s, job.gpus, *(job.resource_s or ()))
    yield from (one for one in (job.duration_s, job.start_s, job.servers, job.gpu_seconds) if one is not None)


def metrics(data: bytes) -> None:
    """Prometheus' answers to all queries, and the slots that follow from them."""
    following = answers(data)

    def query(_expression: str) -> list[prometheus.Sample]:
        return prometheus._samples(following(), "http://test")

    with suppress(FleetError):
        for slot in prometheus.find_slots(query).slots:
            require(0 <= slot.load <= 1 and slot.free_bytes >= 0 and slot.slack_s >= 0, "an impossible slot")


class _Response:
    """An answer of the API server."""

    def __init__(self, body: bytes) -> None:
        self._stream = io.BytesIO(body)

    def read(self, most: int) -> bytes:
        """Up to so many bytes."""
        return self._stream.read(most)

    def readline(self, most: int) -> bytes:
        """A line, or as much of it."""
        return self._stream.readline(most)


class _Api(kubernetes.KubernetesApi):
    """The product's client, whose server answers with the parts of an input."""

    def __init__(self, data: bytes) -> None:
        super().__init__(kubernetes.Access("http://test"))
        self._following, self._left = answers(data), 64

    def _send(self, connection: Any, what: tuple[str, str], body: Any, deadline_s: float) -> Any:
        self._left -= 1
        if self._left < 0:
            raise TimeoutError
        return _Response(self._following())


def api_server(data: bytes) -> None:
    """A list of pods and a watch, and what the service makes of each pod."""
    api = _Api(data)
    with suppress(FleetError):
        _take(api.list_pods().pods)
    with suppress(FleetError):
        _take(change.pod for change in api.watch_pods("1", 1.0))


def _take(found: Any) -> None:
    listed = list(found)
    for pod in listed:
        holder(pod)
    for job in pods.waiting(listed).jobs:
        require(job.memory_bytes >= 0 and math.isfinite(job.value), "a job that cannot be")


def pod_list(data: bytes) -> None:
    """The output of kubectl."""
    with suppress(FleetError):
        pods.waiting(pods.documents(data.decode("utf-8", "replace")))


def extender(data: bytes) -> None:
    """A question of kube-scheduler's."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return
    view = View(None, Reservations(), None)
    with suppress(FleetError):
        asked = question(document)
        json.dumps([filter_result(view, asked), prioritize_result(view, asked)])
    with suppress(FleetError):
        bind_request(document)


TARGETS: Final = {
    "trace": Target("traces of GPU clusters", trace, 64 << 10),
    "fleet_metrics": Target("answers of Prometheus", metrics),
    "fleet_api": Target("answers of Kubernetes", api_server),
    "fleet_pods": Target("lists of pods", pod_list),
    "extender": Target("questions of kube-scheduler", extender),
}
