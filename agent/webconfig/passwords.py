# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Users and their passwords, as bcrypt hashes.

Invariants: a name that nobody has takes as long as a wrong password; a scrape whose password was right before costs no
bcrypt; whoever tries passwords takes a quarter of one core, however many connections that is tried on, and those who
are known are let in meanwhile.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import threading
import time
from collections.abc import Mapping
from enum import Enum, auto
from hashlib import blake2b
from typing import Final

WAIT_SECONDS: Final = 5.0  # for others' passwords to be looked at
_REST: Final = 3  # times as long as a wrong one took, before the next is looked at
_LONGEST_BYTES: Final = 72  # of what bcrypt looks at: a longer one may differ in what it does not see


class Verdict(Enum):
    """On what a client gives for a name and a password."""

    RIGHT = auto()
    NONE = auto()  # there was neither
    WRONG = auto()
    BUSY = auto()  # too many were to be looked at: ask again


class Passwords:
    """Safe for threads. `hashes`: user → bcrypt hash, at least one, each right in form."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = {user.encode(): hashed.encode() for user, hashed in hashes.items()}
        self._costs = sorted(hashed[4:6] for hashed in self._hashes.values())
        self._key = secrets.token_bytes(32)
        self._known: dict[bytes, bytes] = {}  # the digest of each user's password, once it was right
        self._looking = threading.Lock()
        self._next_look = 0.0

    def __len__(self) -> int:
        return len(self._hashes)

    def verdict(self, authorization: str | None) -> Verdict:
        """On the header of that name. Waits for its turn, WAIT_SECONDS at most."""
        if authorization is None:
            return Verdict.NONE
        user, password = _user_and_password(authorization)
        digest = self._digest(password)
        if hmac.compare_digest(self._known.get(user, b""), digest):
            return Verdict.RIGHT
        if not self._looking.acquire(timeout=WAIT_SECONDS):
            return Verdict.BUSY
        try:
            right = self._look(user, password)
        finally:
            self._looking.release()
        if right:
            self._known[user] = digest
        return Verdict.RIGHT if right else Verdict.WRONG

    def _look(self, user: bytes, password: bytes) -> bool:
        time.sleep(max(0.0, self._next_look - time.monotonic()))
        began = time.monotonic()
        right = _fits(password, self._hashes.get(user) or self._nobodys(user)) and user in self._hashes
        ended = time.monotonic()
        self._next_look = ended if right else ended + _REST * (ended - began)
        return right

    def _nobodys(self, user: bytes) -> bytes:
        """A hash of the cost that one of the users' has, for each name always the same."""
        cost = self._costs[int.from_bytes(self._digest(user)[:4], "big") % len(self._costs)]
        return b"$2b$" + cost + b"$" + b"." * 53

    def _digest(self, text: bytes) -> bytes:
        return blake2b(text, key=self._key, digest_size=32).digest()


def _user_and_password(authorization: str) -> tuple[bytes, bytes]:
    """What is no basic authentication is a name and a password that nobody has."""
    scheme, _, encoded = authorization.partition(" ")
    try:
        given = base64.b64decode(encoded.strip(), validate=True) if scheme.lower() == "basic" else b""
    except (binascii.Error, ValueError):
        given = b""
    user, _, password = given.partition(b":")
    return user, password


def _fits(password: bytes, hashed: bytes) -> bool:
    import bcrypt  # of no use where nobody has a password

    try:
        fits = bcrypt.checkpw(password[:_LONGEST_BYTES], hashed)
    except ValueError:  # a NUL in it
        return False
    return fits and len(password) <= _LONGEST_BYTES
