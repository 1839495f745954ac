# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Access to what the agent serves: the rules of a web configuration, basic authentication, and refusals.

Invariants: an unknown user name takes as long as a wrong password; a scrape whose password was right before costs no
bcrypt; guessing passwords costs a quarter of one core at most, over any number of connections, and known clients are
served meanwhile. `AccessRules` are immutable: a request is served under the rules that it began with.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from ipaddress import ip_address
from types import MappingProxyType
from typing import Any, Final

from agent.core.errors import WardenError

WAIT_SECONDS: Final = 5.0  # for the check of other passwords to end
_REST: Final = 3  # times the duration of a wrong check, before the next one begins
_LONGEST_BYTES: Final = 72  # that bcrypt reads: a longer password may differ in the rest


class AccessDecision(Enum):
    """The outcome of checking a client's name and password."""

    RIGHT = auto()
    NONE = auto()  # it sent neither
    WRONG = auto()
    BUSY = auto()  # too many checks are waiting: retry


class Passwords:
    """Checks passwords. Thread-safe. `hashes`: user → bcrypt hash, at least one, each of the right form."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = {user.encode(): hashed.encode() for user, hashed in hashes.items()}
        self._costs = sorted(hashed[4:6] for hashed in self._hashes.values())
        self._key = secrets.token_bytes(32)
        self._known: dict[bytes, bytes] = {}  # user → digest of the password that was right
        self._checking = threading.Lock()
        self._next_check = 0.0

    def __len__(self) -> int:
        return len(self._hashes)

    def verdict(self, authorization: str | None) -> AccessDecision:
        """Checks an Authorization header. Waits for other checks, WAIT_SECONDS at most."""
        if authorization is None:
            return AccessDecision.NONE
        user, password = _user_and_password(authorization)
        digest = self._digest(password)
        if hmac.compare_digest(self._known.get(user, b""), digest):
            return AccessDecision.RIGHT
        if not self._checking.acquire(timeout=WAIT_SECONDS):
            return AccessDecision.BUSY
        try:
            right = self._check(user, password)
        finally:
            self._checking.release()
        if right:
            self._known[user] = digest
        return AccessDecision.RIGHT if right else AccessDecision.WRONG

    def _check(self, user: bytes, password: bytes) -> bool:
        time.sleep(max(0.0, self._next_check - time.monotonic()))
        began = time.monotonic()
        right = _matches(password, self._hashes.get(user) or self._decoy_hash(user)) and user in self._hashes
        ended = time.monotonic()
        self._next_check = ended if right else ended + _REST * (ended - began)
        return right

    def _decoy_hash(self, user: bytes) -> bytes:
        """A hash for an unknown user name: of the cost of one of the users', always the same for one name."""
        cost = self._costs[int.from_bytes(self._digest(user)[:4], "big") % len(self._costs)]
        return b"$2b$" + cost + b"$" + b"." * 53

    def _digest(self, text: bytes) -> bytes:
        return blake2b(text, key=self._key, digest_size=32).digest()


def _user_and_password(authorization: str) -> tuple[bytes, bytes]:
    """Name and password of a basic authentication; empty for anything else, which no user has."""
    scheme, _, encoded = authorization.partition(" ")
    try:
        given = base64.b64decode(encoded.strip(), validate=True) if scheme.lower() == "basic" else b""
    except (binascii.Error, ValueError):
        given = b""
    user, _, password = given.partition(b":")
    return user, password


def _matches(password: bytes, hashed: bytes) -> bool:
    import bcrypt  # needed only where there are passwords

    try:
        matches = bcrypt.checkpw(password[:_LONGEST_BYTES], hashed)
    except ValueError:  # a NUL in it
        return False
    return matches and len(password) <= _LONGEST_BYTES


_NAMES: Final = ("DNS", "IP Address", "email", "URI")


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Who may connect, and how. `context`: TLS; None is clear text. `headers` are added to each answer without them.

    `sans`: a client's certificate needs one of these names; None: any name. `passwords`: None asks for none.
    """

    context: ssl.SSLContext | None = None
    sans: frozenset[str] | None = None
    passwords: Passwords | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def is_restricted(self) -> bool:
        """Whether every client needs a password or a certificate."""
        return self.passwords is not None or self._verify_mode is ssl.CERT_REQUIRED

    @property
    def _verify_mode(self) -> ssl.VerifyMode:
        return ssl.CERT_NONE if self.context is None else self.context.verify_mode

    def take(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether a client may connect whose certificate (as of `getpeercert`) was verified."""
        if self.sans is None:
            return True
        pairs = (certificate or {}).get("subjectAltName", ())
        return any(kind in _NAMES and canonical(value) in self.sans for kind, value in pairs)

    def __str__(self) -> str:
        """TLS 1.2 or later, client certificates required, 2 users."""
        words = ["no TLS" if self.context is None else f"TLS 1.{int(self.context.minimum_version) - 769} or later"]
        if self._verify_mode is not ssl.CERT_NONE:
            need = "required" if self._verify_mode is ssl.CERT_REQUIRED else "verified if given"
            words.append(f"client certificates {need}" + (f" with {len(self.sans)} names" if self.sans else ""))
        if self.passwords is not None:
            words.append(f"{len(self.passwords)} user{'' if len(self.passwords) == 1 else 's'}")
        return ", ".join(words)


def canonical(name: str) -> str:
    """A name of a certificate in canonical form: IP addresses in one notation, others as they are."""
    try:
        return str(ip_address(name.strip()))
    except ValueError:
        return name


REASONS: Final = ("anonymous", "password", "busy", "certificate", "handshake")
_NO_CERTIFICATE: Final = "PEER_DID_NOT_RETURN_A_CERTIFICATE"


class NotAllowedError(WardenError):
    """A client's certificate has none of the allowed names."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """The answer to a request that is refused, and the reason."""

    reason: str
    status: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()


_LOGIN: Final = (("WWW-Authenticate", 'Basic realm="GPU Warden", charset="UTF-8"'),)

_REFUSALS: Final[Mapping[AccessDecision, Refusal]] = MappingProxyType(
    {
        AccessDecision.NONE: Refusal(
            "anonymous", "401 Unauthorized", "a user name and a password are needed\n", _LOGIN
        ),
        AccessDecision.WRONG: Refusal(
            "password", "401 Unauthorized", "the user name or the password is wrong\n", _LOGIN
        ),
        AccessDecision.BUSY: Refusal(
            "busy", "503 Service Unavailable", "too many passwords to check: try again\n", (("Retry-After", "5"),)
        ),
    }
)


class Guard:
    """Applies the access rules and counts refusals. Thread-safe. `terms` returns the present rules."""

    def __init__(self, terms: Callable[[], AccessRules] = AccessRules) -> None:
        self.terms = terms
        self._mutex = threading.Lock()
        self._refused = dict.fromkeys(REASONS, 0)

    def greet(self, connection: ssl.SSLSocket, terms: AccessRules) -> None:
        """The TLS handshake, which waits for the client. Raises OSError and NotAllowedError."""
        try:
            connection.do_handshake()
        except ssl.SSLEOFError:  # the client has hung up, as a port scan does
            raise
        except ssl.SSLError as error:
            of_certificate = isinstance(error, ssl.SSLCertVerificationError) or error.reason == _NO_CERTIFICATE
            self._refuse("certificate" if of_certificate else "handshake")
            raise
        if not terms.take(connection.getpeercert()):
            self._refuse("certificate")
            raise NotAllowedError("the client's certificate has none of client_allowed_sans")

    def refusal(self, environ: Mapping[str, Any], terms: AccessRules) -> Refusal | None:
        """The answer to a request without access; None: it has access."""
        if terms.passwords is None:
            return None
        verdict = terms.passwords.verdict(environ.get("HTTP_AUTHORIZATION"))
        if verdict is AccessDecision.RIGHT:
            return None
        refusal = _REFUSALS[verdict]
        self._refuse(refusal.reason)
        return refusal

    def rows(self) -> Iterator[tuple[str, tuple[str, ...], float]]:
        """For the metrics."""
        for reason, count in self._refused.items():
            yield "gpuwarden_web_refused_total", (reason,), count

    def _refuse(self, reason: str) -> None:
        with self._mutex:
            self._refused[reason] += 1
