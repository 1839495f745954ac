# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The API server: the six calls that the service needs, over the standard library's HTTP.

Invariant: no call outlives its deadline, whatever the server sends; and an error says whether a write may have happened
all the same. A write carries the same limit in its query, so that the server does not carry it out long after the
client has given up.

ApiError                  the message says what to do
├── AwayError             no answer, or 5xx: whether a write happened is unknown
└── RefusedError          the server said no, with `status`: a write did not happen
    ├── GoneError         410: the watch is too old, list again
    ├── MissingError      404
    └── ConflictError     409: the object is another one by now

The package `kubernetes` of PyPI brings 13 more packages for these calls, aiohttp among them, and no overall deadline.
"""

from __future__ import annotations

import http.client
import json
import os
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlencode, urlsplit

from fleet.deadlines import DeadlineSocket
from fleet.model import FleetError
from fleet.sources.pods import SCHEDULER

_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_LONGEST_ANSWER: Final = 512 << 20
_LONGEST_LINE: Final = 8 << 20
_PAGE: Final = 500
_MOST_IDLE: Final = 16
_OURS: Final = f"spec.schedulerName={SCHEDULER},status.phase!=Succeeded,status.phase!=Failed"
"""To a watch a pod that finishes is deleted"""


class ApiError(FleetError):
    """A call to the API server failed."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 3)


class AwayError(ApiError):
    """No answer: whether a write happened is unknown."""


class RefusedError(ApiError):
    """The server said no."""

    status = 0


class GoneError(RefusedError):
    """The watch is too old: list again."""


class MissingError(RefusedError):
    """No such object."""


class ConflictError(RefusedError):
    """The object is another one by now, or has what was asked for already."""


_BY_STATUS: Final[Mapping[int, type[RefusedError]]] = {410: GoneError, 404: MissingError, 409: ConflictError}


@dataclass(frozen=True, slots=True)
class Access:
    """Where the API server is, and who we are to it."""

    url: str
    token: Path | None = None
    """Read at each call: Kubernetes replaces it every hour"""
    authority: Path | None = None


def access(url: str | None, environment: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> Access:
    """Of a URL such as kubectl proxy's; None: of the pod that this runs in."""
    if url is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise FleetError(f"--kubernetes {url}: no URL; give one such as http://127.0.0.1:8001, kubectl proxy's")
        return Access(url.rstrip("/"))
    host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (account / "token").exists():
        raise FleetError("this runs in no pod with a service account: give --kubernetes URL, such as kubectl proxy's")
    return Access(f"https://{f'[{host}]' if ':' in host else host}:{port}", account / "token", account / "ca.crt")


@dataclass(frozen=True, slots=True)
class Listing:
    """Pods of our scheduler at one moment."""

    pods: tuple[Any, ...]
    version: str


@dataclass(frozen=True, slots=True)
class Change:
    """One line of a watch."""

    kind: str
    """ADDED, MODIFIED, DELETED or BOOKMARK"""
    pod: Any
    version: str


class KubernetesApi:
    """Calls from any thread. Connections are kept."""

    def __init__(self, where: Access, timeout_s: float = 5.0) -> None:
        parts = urlsplit(where.url)
        self._access, self._timeout_s = where, timeout_s
        self._host, self._port, self._prefix = parts.hostname or "", parts.port, parts.path.rstrip("/")
        self._context = _context(where) if parts.scheme == "https" else None
        self._idle: deque[http.client.HTTPConnection] = deque()
        self._most_idle = _MOST_IDLE

    def list_pods(self) -> Listing:
        """All pods of our scheduler that have not finished, page by page, of one version."""
        pods: list[Any] = []
        more = ""
        while True:
            query = {"fieldSelector": _OURS, "limit": _PAGE, **({"continue": more} if more else {})}
            answer = self._call("GET", f"/api/v1/pods?{urlencode(query)}")
            metadata, items = _object(answer.get("metadata")), answer.get("items")
            if not isinstance(items, list):
                raise AwayError(f"{self._access.url} lists no pods: is it an API server?")
            pods += items
            more = str(metadata.get("continue") or "")
            if not more:
                return Listing(tuple(pods), str(metadata.get("resourceVersion", "")))

    def watch_pods(self, version: str, seconds: float) -> Iterator[Change]:
        """Changes since `version`, for so long. Raises GoneError where the server has forgotten that version."""
        query = {
            "watch": 1,
            "fieldSelector": _OURS,
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": max(1, round(seconds)),
        }
        connection = self._connection(seconds + self._timeout_s)
        try:
            deadline_s = time.monotonic() + seconds + self._timeout_s
            response = self._send(connection, ("GET", f"/api/v1/pods?{urlencode(query)}"), None, deadline_s)
            while line := response.readline(_LONGEST_LINE):
                yield self._change(line)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise self._away(error) from error
        finally:
            connection.close()

    def pod(self, namespace: str, name: str) -> Any:
        """As it is now."""
        return self._call("GET", _path(namespace, name))

    def annotate(self, namespace: str, name: str, metadata: Mapping[str, Any]) -> Any:
        """`metadata`: annotations, None takes one off; also uid and resourceVersion, which have to be the pod's."""
        return self._call("PATCH", f"{_path(namespace, name)}?{self._limit()}", {"metadata": metadata})

    def bind(self, namespace: str, name: str, uid: str, node: str) -> None:
        """ConflictError: it is bound already."""
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"namespace": namespace, "name": name, "uid": uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": node},
        }
        self._call("POST", f"{_path(namespace, name)}/binding?{self._limit()}", body)

    def record(self, namespace: str, event: Mapping[str, Any]) -> None:
        """An Event, in the namespace of what it is about."""
        self._call("POST", f"/api/v1/namespaces/{quote(namespace, '')}/events?{self._limit()}", event)

    def close(self) -> None:
        """The connections, those that calls under way use when these end."""
        self._most_idle = 0
        while self._idle:
            self._idle.pop().close()

    def _limit(self) -> str:
        return urlencode({"timeout": f"{max(1, round(self._timeout_s))}s"})

    def _change(self, line: bytes) -> Change:
        document = _object(_parsed(line))
        kind, pod = str(document.get("type")), document.get("object")
        if kind == "ERROR":
            status = _object(pod).get("code")
            raise _refused(status if isinstance(status, int) else 500, line, self._access.url)
        return Change(kind, pod, str(_object(_object(pod).get("metadata")).get("resourceVersion", "")))

    def _call(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            kept = self._kept()
            connection = kept or self._connection(self._timeout_s)
            try:
                response = self._send(connection, (method, path), body, deadline_s)
                text = response.read(_LONGEST_ANSWER)
                answer = _parsed(text)
            except ApiError:
                self._keep(connection)
                raise
            except (OSError, ValueError, http.client.HTTPException) as error:
                connection.close()
                if kept is not None and _was_stale(error):
                    continue  # the server had closed it in the meantime: each call here may be made twice
                raise self._away(error) from error
            self._keep(connection)
            return _object(answer)

    def _kept(self) -> http.client.HTTPConnection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _keep(self, connection: http.client.HTTPConnection) -> None:
        if connection.sock is not None and len(self._idle) < self._most_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        connect_s = min(timeout_s, self._timeout_s)
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=connect_s)
        return http.client.HTTPSConnection(self._host, self._port, timeout=connect_s, context=self._context)

    def _send(
        self, connection: http.client.HTTPConnection, what: tuple[str, str], body: Any, deadline_s: float
    ) -> http.client.HTTPResponse:
        """Until the answer's body begins. Raises what the server refuses, after its whole answer."""
        connection.response_class = partial(_response, deadline_s)  # type: ignore[assignment]
        method, path = what
        if connection.sock is None:
            connection.connect()
        connection.sock.settimeout(max(0.001, deadline_s - time.monotonic()))
        text = None if body is None else json.dumps(body).encode()
        connection.request(method, self._prefix + path, text, self._headers(method))
        response = connection.getresponse()
        if response.status >= 300:
            raise _refused(response.status, response.read(1 << 20), self._access.url)
        return response

    def _headers(self, method: str) -> dict[str, str]:
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Accept": "application/json", "Content-Type": kind, "User-Agent": "gpuwarden-fleet"}
        if self._access.token is not None:
            headers["Authorization"] = f"Bearer {self._access.token.read_text().strip()}"
        return headers

    def _away(self, error: Exception) -> AwayError:
        return AwayError(f"the API server at {self._access.url} does not answer: {error or type(error).__name__}")


def _response(deadline_s: float, connected: Any, method: str | None = None) -> http.client.HTTPResponse:
    return http.client.HTTPResponse(DeadlineSocket(connected, deadline_s), method=method)  # type: ignore[arg-type]


def _context(where: Access) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=where.authority)
    except (OSError, ssl.SSLError) as error:
        raise FleetError(f"{where.authority} is no certificate: {error}", 3) from error


def _was_stale(error: Exception) -> bool:
    return isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError)


def _refused(status: int, text: bytes, url: str) -> ApiError:
    try:
        said = str(_object(_parsed(text)).get("message") or "")
    except ValueError:
        said = text[:200].decode(errors="replace")
    hint = "; does the service account have the chart's role?" if status in (401, 403) else ""
    message = f"the API server at {url} says {status}: {said}{hint}"
    if status >= 500:
        return AwayError(message)
    error = _BY_STATUS.get(status, RefusedError)(message)
    error.status = status
    return error


def _parsed(text: bytes) -> Any:
    """ValueError: it is no JSON, or too deeply nested."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _path(namespace: str, name: str) -> str:
    return f"/api/v1/namespaces/{quote(namespace, '')}/pods/{quote(name, '')}"
