# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Lets in who may come in, under the terms of the moment; refuses others and counts why."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from agent.errors import WardenError
from agent.webconfig.passwords import Verdict
from agent.webconfig.terms import Terms

REASONS: Final = ("anonymous", "password", "busy", "certificate", "handshake")
_NO_CERTIFICATE: Final = "PEER_DID_NOT_RETURN_A_CERTIFICATE"


class NotAllowedError(WardenError):
    """A client's certificate has none of the names that may come in."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """An answer to who is not let in, and why."""

    reason: str
    status: str
    text: str
    headers: tuple[tuple[str, str], ...] = ()


_LOGIN: Final = (("WWW-Authenticate", 'Basic realm="GPU Warden", charset="UTF-8"'),)
_REFUSALS: Final[Mapping[Verdict, Refusal]] = MappingProxyType(
    {
        Verdict.NONE: Refusal("anonymous", "401 Unauthorized", "a user name and a password are needed\n", _LOGIN),
        Verdict.WRONG: Refusal("password", "401 Unauthorized", "the user name or the password is wrong\n", _LOGIN),
        Verdict.BUSY: Refusal(
            "busy", "503 Service Unavailable", "too many passwords to look at: try again\n", (("Retry-After", "5"),)
        ),
    }
)


class Guard:
    """For any thread. `terms` gives those of the moment."""

    def __init__(self, terms: Callable[[], Terms] = Terms) -> None:
        self.terms = terms
        self._mutex = threading.Lock()
        self._refused = dict.fromkeys(REASONS, 0)

    def greet(self, connection: ssl.SSLSocket, terms: Terms) -> None:
        """TLS's handshake, which waits for the client. Raises OSError and NotAllowedError."""
        try:
            connection.do_handshake()
        except ssl.SSLEOFError:  # it has hung up: a look at whether the port is open
            raise
        except ssl.SSLError as error:
            about_it = isinstance(error, ssl.SSLCertVerificationError) or error.reason == _NO_CERTIFICATE
            self._refuse("certificate" if about_it else "handshake")
            raise
        if not terms.take(connection.getpeercert()):
            self._refuse("certificate")
            raise NotAllowedError("the client's certificate has none of client_allowed_sans")

    def refusal(self, environ: Mapping[str, Any], terms: Terms) -> Refusal | None:
        """What to answer instead; None: the one who asks may."""
        if terms.passwords is None:
            return None
        verdict = terms.passwords.verdict(environ.get("HTTP_AUTHORIZATION"))
        if verdict is Verdict.RIGHT:
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
