# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The page's two addresses, / and /status.json, for agent.web to serve.

Only who asks under a name that is this machine's own is answered: a page from elsewhere whose name was made to point
here (DNS rebinding) could read the answer otherwise. Nothing is sent that would let another origin read it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from agent.clock import wall_ns
from agent.model import Snapshot
from agent.page.ring import Ring

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    from agent.page.content import Page, Told

FRESH_SECONDS: Final = 0.5  # for so long everybody gets the same page
HEADERS: Final = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


class Site:
    """What is drawn is drawn when somebody asks; `decisions` gives the latest first."""

    def __init__(
        self, get_snapshot: Callable[[], Snapshot | None], ring: Ring, decisions: Callable[[], Sequence[Told]]
    ) -> None:
        self._get_snapshot, self._ring, self._decisions = get_snapshot, ring, decisions
        self._host = socket.gethostname()
        self._mutex = threading.Lock()
        self._page: Page | None = None
        self._made_at = 0.0
        self._drawn: dict[Callable[[Page], str], bytes] = {}

    def routes(self) -> Mapping[str, WSGIApplication]:
        """By path."""
        return {"/": self._serve_html, "/status.json": self._serve_json}

    def _serve_html(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        from agent.page import html  # what only a reader needs is loaded when there is one

        if not self._is_ours(environ):
            return self._refuse(start_response)
        policy = ("Content-Security-Policy", html.POLICY)
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8"), policy, *HEADERS])
        return [self._as(html.document)]

    def _serve_json(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        if not self._is_ours(environ):
            return self._refuse(start_response)
        start_response("200 OK", [("Content-Type", "application/json"), *HEADERS])
        return [self._as(_document)]

    def _as(self, draw: Callable[[Page], str]) -> bytes:
        """The page in one of its forms, each drawn once while it is fresh."""
        from agent.page.content import page

        with self._mutex:
            now = time.monotonic()
            if self._page is None or now - self._made_at >= FRESH_SECONDS:
                told = self._decisions()
                self._page = page(self._get_snapshot(), self._ring, told, self._host, wall_ns())
                self._made_at, self._drawn = now, {}
            if draw not in self._drawn:
                self._drawn[draw] = draw(self._page).encode()
            return self._drawn[draw]

    def _is_ours(self, environ: WSGIEnvironment) -> bool:
        try:
            name = urlsplit("//" + environ.get("HTTP_HOST", "")).hostname or ""
        except ValueError:
            return False
        return name in ("localhost", self._host.lower()) or _is_address(name)

    def _refuse(self, start_response: StartResponse) -> list[bytes]:
        start_response("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8"), *HEADERS])
        return [f"ask for this page by address, as localhost or as {self._host}\n".encode()]


def _document(page: Page) -> str:
    from agent.page.graph import HEIGHT, WIDTH
    from agent.schema import encode

    said: dict[str, Any] = {"box": f"0 0 {WIDTH} {HEIGHT}", **encode(page)}
    return json.dumps(said, separators=(",", ":"), allow_nan=False)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
