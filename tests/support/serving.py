# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The agent's HTTP server with pages on a TCP port, or with the API on UNIX sockets, for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

from agent.core.errors import WardenError
from agent.exporters.api.routes import Api, listeners
from agent.exporters.web.auth import Guard
from agent.exporters.web.handler import Reply
from agent.exporters.web.server import HttpServer, listen_on_tcp

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication


class TcpServer:
    """Serves until closed."""

    def __init__(
        self,
        pages: Mapping[str, WSGIApplication],
        public: Mapping[str, WSGIApplication] = MappingProxyType({}),
        guard: Guard | None = None,
        address: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.listener = listen_on_tcp(address, port, pages, public, guard)
        self.server = HttpServer([self.listener])
        self.guard, self.port, self.url = self.listener.guard, self.listener.port, self.listener.url

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the port."""
        self.server.close()


def no_story(container: str) -> str:
    """Of an agent without a policy."""
    raise WardenError(f"nothing is known about {container}")


def never(_reply: Reply) -> None:
    """An order that is never carried out."""


class ApiServer:
    """agent.sock and read.sock in a folder. Serves until closed."""

    def __init__(self, folder: Path, api: Api, group: int | None = None, deadline_seconds: float = 5.0) -> None:
        self.listeners = listeners(folder, api, group)
        for listener in self.listeners:
            listener.deadline_seconds = deadline_seconds
        self.orders, self.reading = (listener.path for listener in self.listeners)
        self.server = HttpServer(self.listeners)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the socket files."""
        self.server.close()
