# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A Prometheus that answers the fleet's queries with drawn figures: every second GPU has an online service.

`python -m bench.fleet.prometheus PORT NODES GPUS_PER_NODE` serves in a process of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

_GIB: Final = 1 << 30
_SERVICES: Final = 20
Rows = dict[str, list[dict[str, Any]]]
"""What a query begins with → its answer"""


def row(value: float, **labels: str) -> dict[str, Any]:
    return {"metric": labels, "value": [0, str(value)]}


def figures(nodes: int, gpus_per_node: int, seed: int = 1) -> Rows:
    """Of a cluster of healthy GPUs with 80 GiB, of which online services take 4 to 40."""
    draw = Random(seed)
    services = [(draw.uniform(0.1, 0.8), 10 ** draw.uniform(0.7, 2.0), draw.randrange(4, 40)) for _ in range(_SERVICES)]
    rows: Rows = {name: [] for name in _QUERIES}
    for node in range(nodes):
        instance = f"node-{node}"
        rows["time() - gpuwarden_snapshot"].append(row(1, instance=instance))
        rows["gpuwarden_enforcing"].append(row(1, instance=instance))
        for gpu in range(gpus_per_node):
            device = {"instance": instance, "UUID": f"GPU-{node}-{gpu}"}
            rows["gpuwarden_device_info"].append(row(1, **device, model_name="H200"))
            rows["gpuwarden_device_health"].append(row(1, **device, state="healthy"))
            used_gib = 0
            if gpu % 2 == 0:
                used_gib = _with_service(rows, device, (draw.randrange(_SERVICES), services))
            rows["gpuwarden_device_memory_size"].append(row(80 * _GIB, **device))
            rows["gpuwarden_device_memory_used"].append(row(used_gib * _GIB, **device))
    return rows


def _with_service(rows: Rows, device: dict[str, str], what: tuple[int, list[tuple[float, float, int]]]) -> int:
    at, services = what
    load, gaps_per_s, gib = services[at]
    mine = {"instance": device["instance"], "container": f"c-{device['UUID']}", "namespace": "serving", "id": "1"}
    rows["gpuwarden_container_role_info"].append(row(1, **mine, role="online", rule=f"service-{at}"))
    rows["gpuwarden_container_memory_bytes"].append(row(gib * _GIB, **{**mine, **device}))
    rows["max_over_time(gpuwarden_container_memory_bytes"].append(row(gib * _GIB, **{**mine, **device}))
    rows["rate(gpuwarden_device_online_busy"].append(row(load, **device))
    rows["rate(gpuwarden_device_online_gaps"].append(row(gaps_per_s, **device))
    rows["gpuwarden_container_slo_target"].append(row(0.100, **mine))
    rows["max_over_time(gpuwarden_container_slo_latency"].append(row(0.060, **mine))
    return gib


_QUERIES: Final = (
    "gpuwarden_device_info",
    "time() - gpuwarden_snapshot",
    "gpuwarden_device_health",
    "gpuwarden_enforcing",
    "gpuwarden_container_role_info",
    "gpuwarden_container_memory_bytes",
    "gpuwarden_device_held_info",
    "gpuwarden_device_memory_size",
    "gpuwarden_device_memory_used",
    "max_over_time(gpuwarden_container_memory_bytes",
    "rate(gpuwarden_device_online_busy",
    "rate(gpuwarden_device_online_gaps",
    "gpuwarden_container_slo_target",
    "max_over_time(gpuwarden_container_slo_latency",
    "gpuwarden_container_slo_also_target",
    "max_over_time(gpuwarden_container_slo_also_latency",
    "gpuwarden_container_launches_total offset",
    "increase(gpuwarden_container_launches_total",
    "increase(gpuwarden_container_slo_slow_requests_total",
    "increase(gpuwarden_container_slo_requests_total",
    "max_over_time(gpuwarden_container_slo_quantile_ratio",
    "max_over_time(gpuwarden_container_role_info",
)


class Prometheus(ThreadingHTTPServer):
    """`rows` may be replaced while it serves; `fault` is asked before each answer, and may wait or raise OSError."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, rows: Rows, port: int = 0) -> None:
        self.fault: Callable[[], None] = lambda: None
        self.answers: dict[str, bytes] = {}
        self.set(rows)
        super().__init__(("127.0.0.1", port), _Handler)

    def set(self, rows: Rows) -> None:
        """From now on."""
        self.answers = {
            name: json.dumps({"status": "success", "data": {"resultType": "vector", "result": found}}).encode()
            for name, found in rows.items()
        }

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Faults end connections."""


class _Handler(BaseHTTPRequestHandler):
    server: Prometheus

    def do_GET(self) -> None:
        self.server.fault()
        expression = parse_qs(urlsplit(self.path).query)["query"][0]
        text = next(answer for name, answer in self.server.answers.items() if expression.startswith(name))
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """None."""


if __name__ == "__main__":
    Prometheus(figures(int(sys.argv[2]), int(sys.argv[3])), int(sys.argv[1])).serve_forever()
