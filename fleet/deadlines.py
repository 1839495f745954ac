# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A socket whose reads end by a deadline, whatever the other side does.

A socket's own timeout begins anew with each byte, so a peer that sends one byte a second holds its reader for hours.
Here all reads together have to end by one time. Client and server of the fleet's service use it.
"""

from __future__ import annotations

import io
import socket
import time
from typing import Final

_LEAST_S: Final = 0.001
"""A timeout of 0 would make the socket non-blocking"""


class DeadlineReader(io.RawIOBase):
    """The reading side of a socket. A read that is not done by `deadline_s` raises TimeoutError."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        super().__init__()
        self._socket = connected
        self.deadline_s = deadline_s
        """On time.monotonic()'s clock"""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the deadline is over")
        self._socket.settimeout(max(_LEAST_S, left_s))
        return self._socket.recv_into(buffer)


class DeadlineSocket:
    """What http.client's response wants of a socket: a file to read from."""

    def __init__(self, connected: socket.socket, deadline_s: float) -> None:
        self._reader = DeadlineReader(connected, deadline_s)

    def makefile(self, mode: str = "rb") -> io.BufferedReader:
        return io.BufferedReader(self._reader)
