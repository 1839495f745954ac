# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m agent.stacks`: bcc, where it can do no harm. Asked for names on stdin, a line each; not for people.

"TGID ADDRESS", the latter in hexadecimal, is answered with a name or null, in JSON; "renew" with nothing.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from agent.errors import SetupError
from agent.stacks import sandbox

_SYSTEM_PACKAGES = "/usr/lib/python3/dist-packages"
_LONGEST_NAME = 4096


class Caches:
    """bcc's symbol caches, one for each process."""

    def __init__(self, bcc: Any) -> None:
        self._bcc = bcc
        self._caches: dict[int, Any] = {}
        self._fresh: set[int] = set()

    def name(self, tgid: int, address: int) -> str | None:
        """Demangled."""
        found, module = self._resolve(tgid, address)
        if module is None and tgid not in self._fresh:  # loaded since, perhaps
            self._caches.pop(tgid, None)
            found, _ = self._resolve(tgid, address)
        return found

    def renew(self) -> None:
        """Lets each process be read again, once, for what it has loaded meanwhile."""
        self._fresh.clear()

    def _resolve(self, tgid: int, address: int) -> tuple[str | None, object]:
        if tgid not in self._caches:
            self._caches[tgid] = self._bcc.SymbolCache(tgid)
            self._fresh.add(tgid)
        name, _, module = self._caches[tgid].resolve(address, True)
        text = name[:_LONGEST_NAME].decode(errors="backslashreplace") if isinstance(name, bytes) else name
        return text or None, module


def main() -> int:
    """Ends with stdin."""
    try:
        sys.path.append(_SYSTEM_PACKAGES)  # the system's bcc, which a virtual environment does not see
        caches = Caches(importlib.import_module("bcc"))
        sandbox.enter()
    except (ImportError, OSError, AttributeError, SetupError) as error:
        _say(str(error) if isinstance(error, SetupError) else f"bcc: {error}")
        return SetupError.exit_code
    _say(None)
    for line in sys.stdin:
        if line == "renew\n":
            caches.renew()
        else:
            tgid, _, address = line.partition(" ")
            _say(caches.name(int(tgid), int(address, 16)))
    return 0


def _say(answer: str | None) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    sys.exit(main())
