# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The TLS context of a tls_server_config, or what is wrong with it.

Certificates and keys are read here and handed over in memory, since OpenSSL would also read files that other users
could have written.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from agent.config.trusted_file import read_trusted
from agent.core.errors import TrustError
from agent.exporters.web.auth import canonical
from agent.exporters.web.schema import CURVES, SUITES, SUITES_OF_13, VERSIONS, TlsSection

MOST_BYTES: Final = 1 << 20
Item = Literal["cert", "key", "client_ca"]
_VERIFY: Final = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


class _KeyError(Exception):
    """What is wrong with a key of the section."""

    def __init__(self, key: str, text: str) -> None:
        super().__init__(text)
        self.key, self.text = key, text


@dataclass(slots=True)
class TlsBuilder:
    """Builds the TLS context of one section. `problems`: key → what is wrong. `files`: those that it names."""

    section: TlsSection
    folder: Path
    problems: dict[str, str] = field(default_factory=dict)
    files: list[Path] = field(default_factory=list)
    unread: bool = False  # a file could not be read, which may succeed the next time

    def context(self) -> ssl.SSLContext | None:
        """The context; None where there are problems."""
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.options |= ssl.OP_NO_RENEGOTIATION
        made.num_tickets = 0  # each TLS 1.3 handshake verifies the client's certificate
        for step in (self._versions, self._suites, self._curve, self._clients, self._certificate):
            try:
                step(made)
            except _KeyError as error:
                self._add(error)
        return None if self.problems else made

    def sans(self) -> frozenset[str] | None:
        """Names of which a client's certificate needs one; None: any certificate that is verified."""
        allowed = self.section.client_allowed_sans
        return None if allowed is None else frozenset(map(canonical, allowed))

    def _versions(self, made: ssl.SSLContext) -> None:
        lowest, highest = VERSIONS[self.section.min_version], VERSIONS[self.section.max_version]
        if lowest > highest:
            raise _KeyError("min_version", f"is later than max_version, {self.section.max_version}; write TLS12")
        made.minimum_version, made.maximum_version = lowest, highest

    def _suites(self, made: ssl.SSLContext) -> None:
        if not self.section.prefer_server_cipher_suites:
            made.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
        named = self.section.cipher_suites
        if named is None:
            return
        if 0 < len(set(named) & set(SUITES_OF_13)) < len(SUITES_OF_13):
            raise _KeyError("cipher_suites", "has some suites of TLS 1.3, which has all or none; leave these out")
        older = [SUITES[name] for name in named if name in SUITES]
        if not older:
            raise _KeyError("cipher_suites", "has no suite of TLS 1.2; write min_version: TLS13 instead")
        if self.section.min_version == "TLS13":
            raise _KeyError("cipher_suites", "has suites of TLS 1.2, but min_version is TLS13; leave it out")
        try:
            made.set_ciphers(":".join(older))
        except ssl.SSLError as error:
            raise _KeyError("cipher_suites", f"has no suite that this machine's OpenSSL supports ({error})") from error

    def _curve(self, made: ssl.SSLContext) -> None:
        if self.section.curve_preferences is None:
            return
        (name,) = self.section.curve_preferences
        try:
            made.set_ecdh_curve(CURVES[name])
        except (ssl.SSLError, ValueError) as error:
            raise _KeyError(
                "curve_preferences", f"is a curve that this machine's OpenSSL does not support ({error})"
            ) from error

    def _clients(self, made: ssl.SSLContext) -> None:
        kind = self.section.client_auth_type
        made.verify_mode = _VERIFY[kind]
        authorities = self._text("client_ca")
        if authorities is None and self._has_problem("client_ca"):
            return
        if kind == "NoClientCert" and authorities is not None:
            text = "names a CA for client certificates, but none is asked for; write client_auth_type too"
            raise _KeyError(self._key("client_ca"), text)
        if kind != "NoClientCert" and authorities is None:
            raise _KeyError("client_auth_type", "needs a CA for client certificates; write client_ca_file")
        if self.section.client_allowed_sans is not None and kind != "RequireAndVerifyClientCert":
            text = "is for certificates that must be shown; write client_auth_type: RequireAndVerifyClientCert"
            raise _KeyError("client_allowed_sans", text)
        if authorities is None:
            return
        try:
            made.load_verify_locations(cadata=authorities.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise _KeyError(self._key("client_ca"), "has no certificate that can be read; write PEM") from error
        made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # who is named there is trusted, root or not; as Go does

    def _certificate(self, made: ssl.SSLContext) -> None:
        cert, key = self._text("cert"), self._text("key")
        items: tuple[tuple[Item, bytes | None], ...] = (("cert", cert), ("key", key))
        for item, text in items:
            if text is None and not self._has_problem(item):
                self._add(_KeyError(item, f"is not there; write {item}_file: FILE"))
        if cert is None or key is None:
            return
        try:
            with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
                made.load_cert_chain(cert_path, key_path, _no_passphrase)
        except (ssl.SSLError, ValueError) as error:
            raise self._misfit(cert, error) from error

    def _misfit(self, cert: bytes, error: Exception) -> _KeyError:
        reason = getattr(error, "reason", None)
        if isinstance(error, _PassphraseError):
            return _KeyError(self._key("key"), "is locked with a passphrase; write a key without one")
        if reason == "KEY_VALUES_MISMATCH":
            return _KeyError(self._key("key"), "is not the key of the certificate; write the one that it was made for")
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=cert.decode("ascii"))
        except (ssl.SSLError, ValueError):
            return _KeyError(self._key("cert"), "has no certificate that can be read; write PEM")
        return _KeyError(self._key("key"), f"cannot be used ({reason or 'no PEM'}); write a key in PEM")

    def _key(self, item: Item) -> str:
        return f"{item}_file" if getattr(self.section, f"{item}_file") is not None else item

    def _add(self, error: _KeyError) -> None:
        self.problems.setdefault(error.key, error.text)

    def _has_problem(self, item: Item) -> bool:
        return not self.problems.keys().isdisjoint((item, f"{item}_file"))

    def _text(self, item: Item) -> bytes | None:
        """The PEM text; None where there is none, and where it is wrong, which is then in `problems`."""
        try:
            return self._read(item)
        except _KeyError as error:
            self._add(error)
            return None

    def _read(self, item: Item) -> bytes | None:
        inline, name = getattr(self.section, item), getattr(self.section, f"{item}_file")
        if inline is not None and name is not None:
            raise _KeyError(item, f"is here and in {item}_file; leave one of them out")
        if name is None:
            return None if inline is None else str(inline).encode()
        path = self.folder / name
        self.files.append(path)
        try:
            return read_trusted(path, MOST_BYTES)
        except TrustError as error:
            raise _KeyError(f"{item}_file", f"names what is not taken: {error}") from error
        except (OSError, ValueError) as error:
            self.unread = True
            reason = getattr(error, "strerror", None) or error
            raise _KeyError(f"{item}_file", f"names {path}, which cannot be read ({reason}); check it") from error


class _PassphraseError(ValueError):
    """A key needs a passphrase, which an agent cannot be asked for."""


def _no_passphrase() -> str:
    raise _PassphraseError


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """A path that OpenSSL can open; on no disk."""
    descriptor = os.memfd_create("gpuwarden", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{descriptor}"
