# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The sockets of container runtimes and the kubelet: where they are, and queries with a time limit and a back-off.

Invariant: whatever the other side does, a query ends in an outcome, and each outcome is counted. After a failure a
socket is not queried for 1 s, doubled by each failure in a row, to a minute. A kind of source is a class and a line in
`KINDS`; those that speak gRPC are imported when their socket is first found, as gRPC costs ~25 MiB that a node without
such a runtime need not pay.

Docker and Podman are here, as their API needs only HTTP. A user who may start containers may give them any label, so
the kubelet's labels identify a pod only if the cgroup shows that the container is in one (dockershim, cri-dockerd): a
container cannot claim another namespace's rule.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from agent.containers.identity import CONTAINER_NAME, POD_NAME, POD_NAMESPACE, POD_UID, Names, first_process, own_labels
from agent.core.clock import NS_PER_SECOND, monotonic_ns
from agent.core.errors import SourceError, SourceTimeoutError, UsageError
from agent.core.model import Container
from agent.node.http_client import HttpClient

_FIRST_WAIT_NS, _LONGEST_WAIT_NS = NS_PER_SECOND, 60 * NS_PER_SECOND
_MOST_DOUBLINGS = 6


@dataclass(slots=True)
class Breaker:
    """Circuit breaker of one socket. Pure."""

    failures: int = 0  # in a row
    silent_until_ns: int = 0

    def allows(self, now_ns: int) -> bool:
        """Whether the socket may be queried now."""
        return now_ns >= self.silent_until_ns

    def failed(self, now_ns: int) -> None:
        """No answer, or an invalid one."""
        wait_ns = min(_FIRST_WAIT_NS << min(self.failures, _MOST_DOUBLINGS), _LONGEST_WAIT_NS)
        self.failures += 1
        self.silent_until_ns = now_ns + wait_ns

    def succeeded(self) -> None:
        """An answer, also one without a result."""
        self.failures, self.silent_until_ns = 0, 0


class NameSource(Protocol):
    """Something that knows containers by their ids."""

    def look_up(self, container: Container, deadline_ns: int) -> Names | None:
        """Its names; None when there is no such container. SourceError, SourceTimeoutError."""

    def close(self) -> None:
        """Ends a look-up that is under way; from any thread."""


def _engine(path: str) -> NameSource:

    return Engine(path)


def _cri(path: str) -> NameSource:
    from agent.containers.cri import Cri

    return Cri(path)


def _containerd(path: str) -> NameSource:
    from agent.containers.cri import Containerd

    return Containerd(path)


@dataclass(frozen=True, slots=True)
class RuntimeKind:
    """`runtimes`: those whose containers it knows; for these it is queried first."""

    open: Callable[[str], NameSource]
    runtimes: frozenset[str]


KINDS: Mapping[str, RuntimeKind] = {
    "docker": RuntimeKind(_engine, frozenset({"docker"})),
    "podman": RuntimeKind(_engine, frozenset({"podman"})),
    "cri": RuntimeKind(_cri, frozenset({"containerd", "cri-o"})),
    "containerd": RuntimeKind(_containerd, frozenset({"containerd"})),
}


KUBELET = "kubelet"  # knows which pod holds which device, but no names


@dataclass(frozen=True, slots=True)
class Socket:
    """A socket that may exist."""

    kind: str  # one of KINDS, or KUBELET
    path: str

    def present(self) -> bool:
        """Whether the socket exists and belongs to root (or the agent's user): other users' sockets are not trusted."""
        try:
            found = Path(self.path).stat()
        except OSError:
            return False
        return stat.S_ISSOCK(found.st_mode) and found.st_uid in (0, os.geteuid())


_CONTAINERD_PATHS = (
    "/run/containerd/containerd.sock",
    "/run/k3s/containerd/containerd.sock",
    "/run/k0s/containerd.sock",
    "/var/snap/microk8s/common/run/containerd.sock",
)

BUILTIN = (
    Socket("docker", "/run/docker.sock"),
    Socket("podman", "/run/podman/podman.sock"),
    Socket("cri", "/run/crio/crio.sock"),
    *(Socket("cri", path) for path in _CONTAINERD_PATHS),
    *(Socket("containerd", path) for path in _CONTAINERD_PATHS),
    Socket(KUBELET, "/var/lib/kubelet/pod-resources/kubelet.sock"),
)


def sockets(extra: Iterable[str]) -> tuple[Socket, ...]:
    """The built-in sockets and, before them, those given as KIND=PATH. UsageError with the syntax."""
    return (*map(_socket, extra), *BUILTIN)


def _socket(text: str) -> Socket:
    kind, _, path = text.partition("=")
    kinds = (*KINDS, KUBELET)
    if kind not in kinds or not path.startswith("/"):
        raise UsageError(f"{text}: write KIND=/PATH/TO/SOCKET, KIND being one of {', '.join(kinds)}")
    return Socket(kind, path)


_log = logging.getLogger(__name__)
LIMIT_NS = NS_PER_SECOND


class LookupOutcome(StrEnum):
    """How a query ended. The last two: it was not sent."""

    FOUND = "found"
    UNKNOWN = "unknown"
    TIMEOUT = "timeout"
    ERROR = "error"
    ABSENT = "absent"
    HELD_BACK = "held_back"


COUNTED = (LookupOutcome.FOUND, LookupOutcome.UNKNOWN, LookupOutcome.TIMEOUT, LookupOutcome.ERROR)


class Closable(Protocol):
    """A connection to the other end."""

    def close(self) -> None:
        """Ends a query that is under way; from any thread."""


S = TypeVar("S", bound=Closable)
T = TypeVar("T")


class SocketClient(Generic[S]):
    """Queries to one socket. `query` belongs to one thread; `close` and `counts` are for any."""

    def __init__(
        self, socket: Socket, open_source: Callable[[str], S], limit_ns: int, clock: Callable[[], int] = monotonic_ns
    ) -> None:
        self.socket, self._clock = socket, clock
        self._open_source, self._limit_ns = open_source, limit_ns
        self._breaker = Breaker()
        self._lock = threading.Lock()
        self._source: S | None = None
        self._closed = False
        self._counts = dict.fromkeys(COUNTED, 0)

    def query(self, function: Callable[[S, int], T | None]) -> tuple[LookupOutcome, T | None]:
        """The outcome, and the result if there is one. `function` gets the source and its deadline."""
        if not self.socket.present():
            return LookupOutcome.ABSENT, None
        if not self._breaker.allows(self._clock()):
            return LookupOutcome.HELD_BACK, None
        outcome, answer = self._attempt(function)
        self._counts[outcome] += 1
        if outcome in (LookupOutcome.FOUND, LookupOutcome.UNKNOWN):
            self._breaker.succeeded()
        else:
            self._breaker.failed(self._clock())
        return outcome, answer

    def counts(self) -> Mapping[LookupOutcome, int]:
        """Number of queries by outcome."""
        return self._counts

    def close(self) -> None:
        """For good."""
        with self._lock:
            self._closed = True
            source, self._source = self._source, None
        if source is not None:
            source.close()

    def _attempt(self, function: Callable[[S, int], T | None]) -> tuple[LookupOutcome, T | None]:
        try:
            answer = function(self._opened(), monotonic_ns() + self._limit_ns)
        except SourceTimeoutError as error:
            return self._log_failure(LookupOutcome.TIMEOUT, error), None
        except SourceError as error:
            return self._log_failure(LookupOutcome.ERROR, error), None
        except Exception:  # noqa: BLE001  # the answer is from outside: nothing in it may end the thread
            _log.exception("%s gave an unexpected answer", self.socket.path)
            return LookupOutcome.ERROR, None
        return (LookupOutcome.UNKNOWN if answer is None else LookupOutcome.FOUND), answer

    def _log_failure(self, outcome: LookupOutcome, error: SourceError) -> LookupOutcome:
        """Logs a warning once per series of failures, as a socket may stay broken for days."""
        level = logging.DEBUG if self._breaker.failures or self._closed else logging.WARNING
        _log.log(level, "containers keep their short names for now: %s", error)
        return outcome

    def _opened(self) -> S:
        with self._lock:
            if self._closed:
                raise SourceError(f"{self.socket.path}: closed")
            if self._source is None:
                self._source = self._open_source(self.socket.path)
            return self._source


MAX_BYTES: Final = 1 << 20


class Engine:
    """One socket of a Docker or Podman service."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._http = HttpClient(path, MAX_BYTES)

    def look_up(self, container: Container, deadline_ns: int) -> Names | None:
        """None: it has no such container. SourceError."""
        target = f"/containers/{container.id}/json"
        answer = self._http.request("GET", target, deadline_ns)
        if answer.status == 404:
            return None
        if answer.status != 200:
            raise SourceError(f"{self.path}: {target}: status {answer.status}")
        inspected = self._inspected(answer.body)
        if inspected.get("Id") != container.id:
            raise SourceError(f"{self.path}: asked for {container.id}, the answer is about another")
        return _names(inspected, in_pod=POD_UID in container.labels)

    def close(self) -> None:
        """Ends a look-up that is under way."""
        self._http.close()

    def _inspected(self, body: bytes) -> Mapping[str, Any]:
        try:
            inspected = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise SourceError(f"{self.path}: the answer is not JSON: {error}") from error
        if not isinstance(inspected, dict):
            raise SourceError(f"{self.path}: the answer is not a container")
        return inspected


def _names(inspected: Mapping[str, Any], in_pod: bool) -> Names:
    config = inspected.get("Config")
    config = config if isinstance(config, dict) else {}
    labels = config.get("Labels")
    labels = {k: v for k, v in labels.items() if isinstance(v, str)} if isinstance(labels, dict) else {}
    name, image = inspected.get("Name"), config.get("Image")
    name = name.removeprefix("/") if isinstance(name, str) else ""
    return Names(
        name=(labels.get(CONTAINER_NAME) or name) if in_pod else name,
        pod=labels.get(POD_NAME) if in_pod else None,
        namespace=labels.get(POD_NAMESPACE) if in_pod else None,
        image=image if isinstance(image, str) else None,
        labels=labels if in_pod else own_labels(labels),
        tgid=first_process(inspected.get("State"), "Pid"),
    )
