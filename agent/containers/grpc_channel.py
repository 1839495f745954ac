# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""gRPC on a UNIX socket: one call at a time, each with a time limit and a longest answer.

The connection is kept while it works and dropped when a call fails, so a runtime that was restarted is found again by
the next call rather than by gRPC's own, slower, back-off.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from google.protobuf.message import DecodeError

from agent.clock import NS_PER_SECOND, monotonic_ns
from agent.containers.messages import message
from agent.errors import SourceError, SourceTimeoutError

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # else it writes a line of its own when a runtime is restarted
import grpc

MOST_BYTES = 1 << 20  # of an answer


class UnansweredError(SourceError):
    """The server answered with a status that is neither success nor failure for us: see `code`."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code  # "NOT_FOUND" | "UNIMPLEMENTED"


class Channel:
    """One socket. `close` may come from any thread and ends a call that is under way."""

    def __init__(self, path: str, most_bytes: int = MOST_BYTES) -> None:
        self._path, self._most_bytes = path, most_bytes
        self._lock = threading.Lock()
        self._open: Any = None
        self._closed = False

    def call(
        self, method: str, request: Any, answer: str, deadline_ns: int, metadata: Sequence[tuple[str, str]] = ()
    ) -> Any:
        """The answer to `method` ("/package.Service/Method"), a message of that name. UnansweredError, SourceError."""
        left_ns = deadline_ns - monotonic_ns()
        if left_ns <= 0:
            raise SourceTimeoutError(f"{self._path}: no time left for {method}")
        try:
            ask = self._channel().unary_unary(method)
            said = ask(request.SerializeToString(), timeout=left_ns / NS_PER_SECOND, metadata=tuple(metadata))
        except grpc.RpcError as error:
            raise self._translated(method, error) from error
        except ValueError as error:  # what grpc raises for a channel that was closed meanwhile
            raise SourceError(f"{self._path}: closed") from error
        return self._parsed(method, said, answer)

    def close(self) -> None:
        """For good."""
        with self._lock:
            self._closed = True
        self._drop()

    def _channel(self) -> Any:
        with self._lock:
            if self._closed:
                raise SourceError(f"{self._path}: closed")
            if self._open is None:
                options = [
                    ("grpc.default_authority", "localhost"),  # Go's servers refuse the path that grpc would send
                    ("grpc.enable_http_proxy", 0),
                    ("grpc.max_receive_message_length", self._most_bytes),
                    ("grpc.use_local_subchannel_pool", 1),
                ]
                self._open = grpc.insecure_channel(f"unix:{self._path}", options=options)
            return self._open

    def _drop(self) -> None:
        with self._lock:
            channel, self._open = self._open, None
        if channel is not None:
            channel.close()

    def _translated(self, method: str, error: Any) -> SourceError:
        code = error.code().name
        if code in ("NOT_FOUND", "UNIMPLEMENTED"):
            return UnansweredError(f"{self._path}: {method}: {code}", code)
        self._drop()
        what = f"{self._path}: {method}: {code}: {error.details()}"
        return SourceTimeoutError(what) if code == "DEADLINE_EXCEEDED" else SourceError(what)

    def _parsed(self, method: str, said: bytes, answer: str) -> Any:
        try:
            return message(answer).FromString(said)
        except DecodeError as error:
            self._drop()
            raise SourceError(f"{self._path}: {method} was answered with something else: {error}") from error
