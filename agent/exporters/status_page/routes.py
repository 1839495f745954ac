# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The status page's two paths: / is the page, the same bytes for every reader, and /status.json its figures.

Invariants: the page holds no figure and no name; page.js draws them from /status.json, as text nodes and attributes
only. Only a request whose Host is this machine's own name or address is answered: a page from elsewhere whose name was
made to point here (DNS rebinding) could read the answer otherwise. No header lets another origin read it.
"""

from __future__ import annotations

import json
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from agent.core.clock import wall_ns
from agent.core.model import Snapshot
from agent.exporters.status_page.history import Ring
from agent.exporters.web.handler import MISDIRECTED, OwnNames

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    from agent.exporters.status_page.content import DecisionRow, PageContent

FRESH_SECONDS: Final = 0.5  # for so long every reader gets the same figures

HEADERS: Final = (
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


class Site:
    """The figures are computed when a reader asks; `decisions` gives the latest first.

    `page` is the static one unless a test has another.
    """

    def __init__(
        self,
        get_snapshot: Callable[[], Snapshot | None],
        ring: Ring,
        decisions: Callable[[], Sequence[DecisionRow]],
        page: StaticPage | None = None,
        names: OwnNames | None = None,
    ) -> None:
        self._get_snapshot, self._ring, self._decisions = get_snapshot, ring, decisions
        self._page = page
        self._names = names or OwnNames()
        self._mutex = threading.Lock()  # of the figures
        self._figures = b""
        self._stale_at = 0.0

    def routes(self) -> Mapping[str, WSGIApplication]:
        """By path."""
        return {"/": self._serve_page, "/status.json": self._serve_figures}

    def _serve_page(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:

        if not self._is_ours(environ):
            return self._refuse(start_response)
        page = self._page or PAGE
        policy = ("Content-Security-Policy", page.policy)
        start_response("200 OK", [("Content-Type", "text/html; charset=utf-8"), policy, *HEADERS])
        return [page.document.encode()]

    def _serve_figures(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        if not self._is_ours(environ):
            return self._refuse(start_response)
        start_response("200 OK", [("Content-Type", "application/json"), *HEADERS])
        return [self._fresh_figures()]

    def _fresh_figures(self) -> bytes:
        from agent.exporters.status_page.content import page

        with self._mutex:
            if time.monotonic() >= self._stale_at:
                content = page(self._get_snapshot(), self._ring, self._decisions(), self._names.machine, wall_ns())
                self._figures = _document(content).encode()
                self._stale_at = time.monotonic() + FRESH_SECONDS
            return self._figures

    def _is_ours(self, environ: WSGIEnvironment) -> bool:
        return self._names.has(environ.get("HTTP_HOST", ""))

    def _refuse(self, start_response: StartResponse) -> list[bytes]:
        start_response(MISDIRECTED, [("Content-Type", "text/plain; charset=utf-8"), *HEADERS])
        return [f"ask for this page by address, as localhost or as {self._names.machine}\n".encode()]


def _document(page: PageContent) -> str:
    from agent.core.snapshot_json import encode
    from agent.exporters.status_page.history import HEIGHT, WIDTH

    document: dict[str, Any] = {"box": f"0 0 {WIDTH} {HEIGHT}", **encode(page)}
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class StaticPage:
    """The document, and the Content-Security-Policy that it is sent with."""

    document: str
    policy: str


def _file(name: str) -> str:
    return files("agent.exporters.status_page").joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"


STYLE: Final = _file("page.css")
SCRIPT: Final = _file("page.js")

# Nothing from elsewhere, and of ours only these two texts: markup that got into the page would neither run nor load.
POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_source(SCRIPT)}",
        f"style-src {_source(STYLE)}",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)

PAGE: Final = StaticPage(
    _file("page.html")
    .replace("<style>page.css</style>", f"<style>{STYLE}</style>")
    .replace("<script>page.js</script>", f"<script>{SCRIPT}</script>"),
    POLICY,
)
