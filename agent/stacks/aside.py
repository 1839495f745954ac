# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""bcc in a process of its own: it reads the files of other people's programs in C++, and may hang, grow or break.

That process has next to no rights (agent/stacks/sandbox.py). One that takes too long or ends is not started again: what
it would have named is called by module and offset.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress

from agent.errors import SetupError

_PATIENCE_SECONDS = 30.0  # the symbols of the largest libraries take some of them
_MOST_BYTES = 1 << 16  # of an answer
_INSTALL = (
    "names of functions need bcc: install it (Debian: apt-get install python3-bpfcc), or use --no-symbols ({why})"
)


class Bcc:
    """See the module. `close` ends the process."""

    def __init__(self, patience_seconds: float = _PATIENCE_SECONDS) -> None:
        """SetupError names the package."""
        self._patience_seconds = patience_seconds
        self.trouble: str | None = None
        self._left = b""
        command = [sys.executable, "-I", "-m", "agent.stacks"]  # -I: the working directory may be anybody's
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        why = self._answer()
        if why is not None or self.trouble is not None:
            self.close()
            raise SetupError(_INSTALL.format(why=why or self.trouble))

    def name(self, tgid: int, address: int) -> str | None:
        """Demangled; None where it has none, or is no more."""
        self._send(f"{tgid} {address:x}\n")
        return self._answer()

    def renew(self) -> None:
        """Lets each process be read again, once, for what it has loaded meanwhile."""
        self._send("renew\n")

    def close(self) -> None:
        """At once, whatever it does."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()
        self._process.wait()

    def _send(self, line: str) -> None:
        if self.trouble is None:
            assert self._process.stdin
            try:
                self._process.stdin.write(line.encode())
                self._process.stdin.flush()
            except OSError:
                self._give_up("it ended")

    def _answer(self) -> str | None:
        ends = time.monotonic() + self._patience_seconds
        while self.trouble is None:
            line, whole, rest = self._left.partition(b"\n")
            if whole:
                self._left = rest
                return self._read(line)
            if len(self._left) > _MOST_BYTES:
                self._give_up("its answer has no end")
            else:
                self._receive(ends)
        return None

    def _read(self, line: bytes) -> str | None:
        try:
            answer = json.loads(line)
        except ValueError:
            self._give_up("it answered nonsense")
            return None
        return answer if isinstance(answer, str) else None

    def _receive(self, ends: float) -> None:
        assert self._process.stdout
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, ends - time.monotonic())):
                self._give_up(f"it took longer than {self._patience_seconds:g} s")
                return
        chunk = os.read(self._process.stdout.fileno(), 1 << 16)
        self._left += chunk
        if not chunk:
            self._give_up("it ended")

    def _give_up(self, why: str) -> None:
        self.trouble = f"the reader of symbols was given up ({why}): modules and offsets in their place"
        self._process.kill()
