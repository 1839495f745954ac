# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A client of JSON over one kept HTTP connection: what a bench asks the fleet's servers with."""

from __future__ import annotations

import http.client
import json
import threading
from typing import Any, Self

_TIMEOUT_S = 10.0
_of_thread = threading.local()


class Client:
    """For one thread. What the connection does wrong is an OSError; the next request makes another one."""

    def __init__(self, address: str) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=_TIMEOUT_S)

    @classmethod
    def of_thread(cls, address: str) -> Self:
        """The present thread's own."""
        kept: dict[str, Self] = _of_thread.__dict__.setdefault("clients", {})
        if address not in kept:
            kept[address] = cls(address)
        return kept[address]

    def post(self, path: str, document: Any) -> Any:
        """The answer's document."""
        return self._ask("POST", path, json.dumps(document).encode())

    def get(self, path: str) -> Any:
        """The answer's document."""
        return self._ask("GET", path, None)

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        try:
            self._connection.request(method, path, body)
            response = self._connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            self._connection.close()
            raise OSError(str(error)) from error
        if response.status >= 400:
            raise OSError(f"{path}: {response.status}: {text[:500]!r}")
        return json.loads(text)
