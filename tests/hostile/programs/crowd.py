# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Every scrape of the agent's port is answered, and clients from elsewhere find room.

`crowd.py PORT WAY UID`: opens connections from one loopback address after another until stdin ends. It is `mute`
or begins `half` a request.
"""

from __future__ import annotations

import contextlib
import encodings.idna  # before it is another user, who may not read the library  # noqa: F401
import itertools
import os
import select
import socket
import sys
from collections import deque

_AT_ONCE = 200
_SAYS = {"mute": b"", "half": b"GET /met"}


def main() -> None:
    """Does it."""
    os.setuid(int(sys.argv[3]))
    port, says, kept = int(sys.argv[1]), _SAYS[sys.argv[2]], deque[socket.socket]()
    for number in itertools.count():
        if select.select([sys.stdin], [], [], 0)[0]:
            return
        with contextlib.suppress(OSError):
            source = f"127.0.{number // 250 % 250}.{number % 250 + 2}"
            kept.append(socket.create_connection(("127.0.0.1", port), timeout=5, source_address=(source, 0)))
            kept[-1].sendall(says)
        if len(kept) > _AT_ONCE:
            kept.popleft().close()
        if number == _AT_ONCE:
            print("there", flush=True)


if __name__ == "__main__":
    main()
