# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""An API server that has pods and nothing else, with the answers that the fleet's service relies on.

List in pages, watch from a version (410 Gone where that is forgotten), merge patch of metadata with uid and
resourceVersion as preconditions, binding (409 where the pod is bound), events. It judges: a GPU that two bound pods
have is a double booking. `fault` is asked before each request, for tests. No admission, no schema, no etcd: a real one
is slower. `python -m bench.fleet.api_server PORT` serves in a process of its own.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final
from urllib.parse import parse_qs, unquote, urlsplit

GPU: Final = "gpuwarden.io/gpu"
_REMEMBERED: Final = 50_000


class RefusedError(Exception):
    """Status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Cluster:
    """The pods, and what happened to them."""

    pods: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Namespace/name → document"""
    log: deque[tuple[int, str, dict[str, Any]]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    events: list[Any] = field(default_factory=list)
    doubles: list[tuple[str, str, str]] = field(default_factory=list)
    """GPU, and the two pods that have it"""
    by_gpu: dict[str, str] = field(default_factory=dict)
    version: int = 1
    oldest: int = 0
    """Versions before this one are forgotten"""
    changed: threading.Condition = field(default_factory=threading.Condition)

    def add(self, name: str, annotations: Mapping[str, str], namespace: str = "batch", **spec: Any) -> dict[str, Any]:
        """A pod that waits for our scheduler."""
        with self.changed:
            self.version += 1
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {
                    "name": name,
                    "namespace": namespace,
                    "uid": str(uuid.uuid4()),
                    "creationTimestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "annotations": dict(annotations),
                },
                "spec": {"schedulerName": "gpuwarden", **spec},
                "status": {"phase": "Pending"},
            }
            self._store("ADDED", pod)
            return pod

    def patch(self, key: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
        """A merge patch."""
        with self.changed:
            pod = self.get(key)
            for name in ("uid", "resourceVersion"):
                if metadata.get(name, pod["metadata"][name]) != pod["metadata"][name]:
                    raise RefusedError(409, f"{key}: {name} is another one")
            annotations = {**pod["metadata"].get("annotations", {}), **(metadata.get("annotations") or {})}
            annotations = {name: value for name, value in annotations.items() if value is not None}
            return self._store("MODIFIED", {**pod, "metadata": {**pod["metadata"], "annotations": annotations}})

    def bind(self, key: str, uid: str, node: str) -> dict[str, Any]:
        """To a node, once."""
        with self.changed:
            pod = self.get(key)
            if pod["metadata"]["uid"] != uid:
                raise RefusedError(409, f"{key}: uid is another one")
            if pod["spec"].get("nodeName"):
                raise RefusedError(409, f"pod {key} is already assigned to node {pod['spec']['nodeName']}")
            return self._store("MODIFIED", {**pod, "spec": {**pod["spec"], "nodeName": node}})

    def set_phase(self, key: str, phase: str, **more: Any) -> None:
        """Of one pod, as its kubelet, or the scheduler, would."""
        with self.changed:
            self._store("MODIFIED", {**self.get(key), "status": {"phase": phase, **more}})

    def delete(self, key: str) -> None:
        """At once."""
        with self.changed:
            pod = self._store("DELETED", self.get(key))
            del self.pods[key]
            self._free(pod)

    def forget(self) -> None:
        """All versions so far: watches from them are gone."""
        with self.changed:
            self.version += 1
            self.oldest = self.version
            self.log.clear()
            self.changed.notify_all()

    def get(self, key: str) -> dict[str, Any]:
        """A pod's document, never changed in place."""
        if key not in self.pods:
            raise RefusedError(404, f"pods {key!r} not found")
        return self.pods[key]

    def _store(self, kind: str, pod: dict[str, Any]) -> dict[str, Any]:
        self.version += 1
        pod = {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(self.version)}}
        key = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        self.pods[key] = pod
        if len(self.log) == self.log.maxlen:
            self.oldest = self.log[0][0]
        self.log.append((self.version, kind, pod))
        self._judge(key, pod)
        self.changed.notify_all()
        return pod

    def _judge(self, key: str, pod: dict[str, Any]) -> None:
        gpu = pod["metadata"].get("annotations", {}).get(GPU)
        if _finished(pod):
            self._free(pod)
        elif gpu and pod["spec"].get("nodeName"):
            other = self.by_gpu.setdefault(gpu, key)
            if other != key:
                self.doubles.append((gpu, other, key))

    def _free(self, pod: dict[str, Any]) -> None:
        key = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
        gpu = pod["metadata"].get("annotations", {}).get(GPU)
        if gpu and self.by_gpu.get(gpu) == key:
            del self.by_gpu[gpu]


Fault = Callable[[str, str], None]
"""Method and path; it may wait, or raise RefusedError"""


def no_fault(_method: str, _path: str) -> None:
    """Everything works."""


class ApiServer(ThreadingHTTPServer):
    """Serves a cluster."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, cluster: Cluster, port: int = 0, fault: Fault = no_fault) -> None:
        self.cluster, self.fault, self.stopped = cluster, fault, False
        self.listed: dict[int, list[Any]] = {}
        """Version → what the further pages of a list are of"""
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ApiServer

    def do_GET(self) -> None:
        self._serve()

    def do_PATCH(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        address = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(address.query).items()}
        try:
            self.server.fault(self.command, self.path)
            if query.get("watch"):
                self._watch(int(query["resourceVersion"]), float(query["timeoutSeconds"]))
                return
            self._answer(200, self._found(address.path, query, json.loads(body) if body else {}))
        except RefusedError as error:
            self._answer(error.status, {"kind": "Status", "code": error.status, "message": str(error)})

    def _found(self, path: str, query: Mapping[str, str], body: Any) -> Any:
        cluster = self.server.cluster
        parts = [unquote(part) for part in path.strip("/").split("/")]
        if self.command == "GET" and parts == ["api", "v1", "pods"]:
            return self._list(query)
        if parts[0] == "bench":
            return self._bench(parts[1], body)
        key = f"{parts[3]}/{parts[5]}" if len(parts) > 5 else ""
        if parts[-1] == "events":
            cluster.events.append(body)
            return body
        if parts[-1] == "binding":
            cluster.bind(key, body["metadata"]["uid"], body["target"]["name"])
            return {"kind": "Status", "status": "Success"}
        return cluster.get(key) if self.command == "GET" else cluster.patch(key, body["metadata"])

    def _list(self, query: Mapping[str, str]) -> Any:
        version, first = map(int, query.get("continue", "0:0").split(":"))
        limit, cluster = int(query.get("limit", 500)), self.server.cluster
        with cluster.changed:
            if not version:
                version = cluster.version
                self.server.listed[version] = [pod for pod in cluster.pods.values() if not _finished(pod)]
        pods = self.server.listed.get(version, [])
        metadata = {"resourceVersion": str(version)}
        if first + limit < len(pods):
            metadata["continue"] = f"{version}:{first + limit}"
        else:
            self.server.listed.pop(version, None)
        return {"kind": "PodList", "metadata": metadata, "items": pods[first : first + limit]}

    def _bench(self, what: str, body: Any) -> Any:
        cluster = self.server.cluster
        if what == "pods":
            made = [cluster.add(one["name"], one["annotations"]) for one in body]
            return [pod["metadata"]["uid"] for pod in made]
        if what == "finish":
            for key in body:
                cluster.set_phase(key, "Succeeded")
        bound = sum(bool(pod["spec"].get("nodeName")) for pod in cluster.pods.values())
        held = sum(GPU in pod["metadata"].get("annotations", {}) for pod in cluster.pods.values())
        return {"bound": bound, "annotated": held, "doubles": cluster.doubles, "events": len(cluster.events)}

    def _watch(self, version: int, seconds: float) -> None:
        cluster, end_s = self.server.cluster, time.monotonic() + seconds
        if version < cluster.oldest:
            raise RefusedError(410, "too old resource version")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while time.monotonic() < end_s and not self.server.stopped:
            with cluster.changed:
                if cluster.version <= version:
                    cluster.changed.wait(0.1)
                gone = version < cluster.oldest
                new = _tail(cluster.log, version)
            lines = [{"type": "DELETED" if _finished(pod) else kind, "object": pod} for _, kind, pod in new]
            if gone:
                lines = [{"type": "ERROR", "object": {"kind": "Status", "code": 410}}]
            for line in lines:
                text = json.dumps(line).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
            if gone:
                break
            version = new[-1][0] if new else version
        self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, document: Any) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """None."""


def _finished(pod: dict[str, Any]) -> bool:
    """Then the field selector of the service leaves it out."""
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def _tail(log: deque[tuple[int, str, dict[str, Any]]], version: int) -> list[tuple[int, str, dict[str, Any]]]:
    found = []
    for one in reversed(log):
        if one[0] <= version:
            break
        found.append(one)
    return found[::-1]


if __name__ == "__main__":
    sys.setswitchinterval(0.0005)
    ApiServer(Cluster(), int(sys.argv[1])).serve_forever()
