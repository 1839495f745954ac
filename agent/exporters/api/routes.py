# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's API, version 1, on its UNIX sockets: docs/api.md.

GET /v1/snapshot and /v1/explain[/CONTAINER] are answered on both sockets, POST /v1/reload on agent.sock alone.
`agent.sock` is its owner's; `read.sock` beside it is also for the group gpuwarden, where there is one. Invariants: no
client can connect before a file has its mode, and a file is replaced only when no process listens on it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.core.errors import WardenError
from agent.core.model import Snapshot
from agent.core.snapshot_json import dumps
from agent.exporters.api.client import AGENT_SOCK, EXPLAIN, READ_SOCK, RELOAD, SNAPSHOT, listen
from agent.exporters.web.handler import Answer, Order, Reply, Route
from agent.exporters.web.server import Listener

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

_log = logging.getLogger(__name__)


DEADLINE_SECONDS: Final = 5.0
JSON_HEADERS: Final = (("Content-Type", "application/json"), ("Cache-Control", "no-store"))

_NO_TICK: Final = Answer.refusal(
    HTTPStatus.SERVICE_UNAVAILABLE, "no tick is complete yet: try again in a second", ("Retry-After", "1")
)

_READ_ONLY: Final = Answer.refusal(HTTPStatus.FORBIDDEN, f"orders are taken on {AGENT_SOCK}, as root")


@dataclass(frozen=True, slots=True)
class Api:
    """What the API is about.

    `explain` returns a JSON document: of "", what there is to explain; of a container, its story. It raises WardenError
    where there is none. `reload` answers when it was carried out.
    """

    snapshot: Callable[[], Snapshot | None]
    explain: Callable[[str], str]
    reload: Order


class UnixListener(Listener):
    """A socket file, which is removed at the end if it is still this one."""

    def __init__(self, path: Path, group: int | None, routes: Mapping[str, Route]) -> None:
        super().__init__(listen(path, group), routes, DEADLINE_SECONDS)
        self.path = path
        self._inode = path.stat().st_ino

    def close(self) -> None:
        """Removes the file too."""
        super().close()
        with contextlib.suppress(FileNotFoundError):
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()


def listeners(run_dir: Path, api: Api, group: int | None) -> tuple[UnixListener, UnixListener]:
    """agent.sock and read.sock, both or neither. SetupError."""
    reading = {
        SNAPSHOT: Route(_page(_Snapshots(api.snapshot))),
        EXPLAIN: Route(_page(lambda _: _explanation(api, ""))),
        f"{EXPLAIN}/*": Route(_page(lambda path: _explanation(api, path.removeprefix(f"{EXPLAIN}/")))),
    }
    with ExitStack() as stack:
        orders = UnixListener(run_dir / AGENT_SOCK, None, {**reading, RELOAD: Route(order=api.reload)})
        stack.callback(orders.close)
        read_only = UnixListener(run_dir / READ_SOCK, group, {**reading, RELOAD: Route(order=_refuse_order)})
        stack.pop_all()
    return orders, read_only


def _refuse_order(reply: Reply) -> None:
    reply(_READ_ONLY)


class _Snapshots:
    """Each snapshot is encoded once, however many clients ask for it."""

    def __init__(self, get_snapshot: Callable[[], Snapshot | None]) -> None:
        self._get_snapshot = get_snapshot
        self._mutex = threading.Lock()
        self._encoded: tuple[Snapshot, Answer] | None = None

    def __call__(self, _path: str) -> Answer:
        with self._mutex:
            snapshot = self._get_snapshot()
            if snapshot is None:
                return _NO_TICK
            if self._encoded is None or self._encoded[0] is not snapshot:
                self._encoded = snapshot, json_answer(dumps(snapshot))
            return self._encoded[1]


def _explanation(api: Api, container: str) -> Answer:
    try:
        return json_answer(api.explain(container))
    except WardenError as error:
        return Answer.refusal(HTTPStatus.NOT_FOUND, str(error))


def json_answer(document: str, status: HTTPStatus = HTTPStatus.OK) -> Answer:
    """One JSON document and a newline."""
    return Answer(f"{status.value} {status.phrase}", f"{document}\n".encode(), JSON_HEADERS)


def _page(answer: Callable[[str], Answer]) -> WSGIApplication:
    """The page of a function from its path, which WSGI has in latin-1."""

    def page(environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        made = answer(environ["PATH_INFO"].encode("latin-1").decode(errors="surrogateescape"))
        start_response(made.status, [*made.headers])
        return [made.body]

    return page
