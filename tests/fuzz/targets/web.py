# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a client of the agent's own port sends."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from agent.exporters.web.auth import AccessRules, Guard, Passwords
from agent.exporters.web.handler import PLAIN, OwnNames, RequestHandler, RequestState, Route
from tests.fuzz.target import Target, require

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment


def _page(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
    start_response("200 OK", [PLAIN])
    return [environ["PATH_INFO"].encode("latin-1"), environ["QUERY_STRING"].encode("latin-1", "replace")]


class _NoPasswords(Passwords):
    """Passwords that are all wrong, without the quarter of a second that bcrypt takes."""

    def _check(self, user: bytes, password: bytes) -> bool:
        return False


_ROUTES: Final = {
    "/metrics": Route(OwnNames().guarded(_page)),
    "/explain/*": Route(OwnNames().guarded(_page)),
    "/healthz": Route(_page, public=True),
}
_RULES: Final = (AccessRules(), AccessRules(passwords=_NoPasswords({"alice": "$2b$04$" + "." * 53})))


def request(data: bytes) -> None:
    """A client's request: a whole answer, and nothing else than an answer."""
    rules = _RULES[len(data) % 2]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setblocking(False)
        with suppress(BlockingIOError):
            theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        state = RequestState(time.monotonic() + 60)
        RequestHandler(ours, _ROUTES, Guard(lambda: rules), rules, state)
        ours.shutdown(socket.SHUT_WR)
        if state.failure is not None:
            raise state.failure
        answer = theirs.recv(1 << 20)
        require(not answer or answer.startswith(b"HTTP/1."), "an answer in another language")


TARGETS: Final = {"web_request": Target("requests to the agent", request)}
