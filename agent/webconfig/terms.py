# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a web configuration comes to. Immutable: who is being served is served under one."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final

from agent.webconfig.passwords import Passwords

_NAMES: Final = ("DNS", "IP Address", "email", "URI")


@dataclass(frozen=True, slots=True)
class Terms:
    """`context`: None is clear text. `sans`: names, one of which a client's certificate must have; None: any will do.

    `passwords`: None is nobody is asked for one. `headers`: of each answer that has not its own.
    """

    context: ssl.SSLContext | None = None
    sans: frozenset[str] | None = None
    passwords: Passwords | None = None
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def ask_who(self) -> bool:
        """Whether nobody is let in without a password or a certificate."""
        return self.passwords is not None or self._verify_mode is ssl.CERT_REQUIRED

    @property
    def _verify_mode(self) -> ssl.VerifyMode:
        return ssl.CERT_NONE if self.context is None else self.context.verify_mode

    def take(self, certificate: Mapping[str, Any] | None) -> bool:
        """Whether a client may come in whose certificate, as `getpeercert` has it, was verified."""
        if self.sans is None:
            return True
        pairs = (certificate or {}).get("subjectAltName", ())
        return any(kind in _NAMES and canonical(value) in self.sans for kind, value in pairs)

    def __str__(self) -> str:
        """TLS 1.2 or later, client certificates required, 2 users."""
        said = ["no TLS" if self.context is None else f"TLS 1.{int(self.context.minimum_version) - 769} or later"]
        if self._verify_mode is not ssl.CERT_NONE:
            need = "required" if self._verify_mode is ssl.CERT_REQUIRED else "looked at"
            said.append(f"client certificates {need}" + (f" with {len(self.sans)} names" if self.sans else ""))
        if self.passwords is not None:
            said.append(f"{len(self.passwords)} user{'' if len(self.passwords) == 1 else 's'}")
        return ", ".join(said)


def canonical(name: str) -> str:
    """One of a certificate's names: addresses in one form, others as they are."""
    try:
        return str(ip_address(name.strip()))
    except ValueError:
        return name
