# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The latency of the service that it asks stays what other clients see, and their requests are all counted.

`http_client.py WAY PORT COUNT`: `errors` asks for what is not there; `slow_heads` and `slow_bodies` take a second to
send a request that is answered at once; `idle` opens connections and says nothing, `halves` sends half a head, and both
keep them until stdin ends.
"""

from __future__ import annotations

import resource
import socket
import sys
import time

_PIECES = 10
_GET = b"GET /quick HTTP/1.1\r\nHost: service\r\n\r\n"
_POST = b"POST /quick HTTP/1.1\r\nHost: service\r\nContent-Length: 20\r\n\r\n"


def _ask(port: int, head: bytes, slow: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(head)
        size = max(1, len(slow) // _PIECES)
        for at in range(0, len(slow), size):
            time.sleep(1 / _PIECES)
            connection.sendall(slow[at : at + size])
        connection.recv(4096)


def _occupy(port: int, count: int, data: bytes) -> None:
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 8192), most))
    kept = []
    for _ in range(count):
        kept.append(socket.create_connection(("127.0.0.1", port)))
        if data:
            kept[-1].sendall(data)
    print("there", flush=True)
    sys.stdin.read()


def main() -> None:
    """Does it."""
    way, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if way in ("idle", "halves"):
        _occupy(port, count, _GET[:20] if way == "halves" else b"")
        return
    head, slow = {"errors": (_GET.replace(b"/quick", b"/absent"), b""), "slow_heads": (b"", _GET)}.get(
        way, (_POST, b"x" * 20)
    )
    for _ in range(count):
        _ask(port, head, slow)


if __name__ == "__main__":
    main()
