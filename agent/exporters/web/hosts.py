# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The names by which the TCP port may be asked.

A page from elsewhere whose name was made to point here (DNS rebinding) could read the answer otherwise: its requests
carry that name. An address is never such a name.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

STATUS: Final = "421 Misdirected Request"


class OwnNames:
    """Addresses, localhost, the machine's name with and without its domain, and those given."""

    def __init__(self, also: Iterable[str] = ()) -> None:
        self.machine = socket.gethostname()
        own = self.machine.lower()
        self._names = {"localhost", own, own.partition(".")[0], *(name.lower().rstrip(".") for name in also)}

    def has(self, host: str) -> bool:
        """Whether a Host header, with or without a port, is one of them."""
        try:
            name = (urlsplit("//" + host).hostname or "").rstrip(".")
        except ValueError:
            return False
        return name in self._names or _is_address(name)

    def guarded(self, page: WSGIApplication) -> WSGIApplication:
        """The page, for requests by these names, and for those without any: browsers always send one."""

        def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if self.has(environ.get("HTTP_HOST", "localhost")):
                return page(environ, start_response)
            start_response(STATUS, [("Content-Type", "text/plain; charset=utf-8")])
            text = f"ask for this page by address, as localhost, as {self.machine}, or by a name given with --web-host"
            return [f"{text}\n".encode()]

        return serve


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
