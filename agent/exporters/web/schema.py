# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The keys of a web configuration, and what OpenSSL calls the TLS versions, cipher suites and curves that it names.

Invariant: no message quotes a value, as that may be a secret: a key, or a hash of a password. The suites are those of
Go's crypto/tls.CipherSuites, which is all that the exporter-toolkit accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from ssl import TLSVersion
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, Field

from agent.config.sections import FileFormat, Section, mistake
from agent.config.yaml_source import KeyPath, Problem, Source

VERSIONS: Final = {"TLS12": TLSVersion.TLSv1_2, "TLS13": TLSVersion.TLSv1_3}
BROKEN_VERSIONS: Final = ("TLS10", "TLS11")
CURVES: Final = {"CurveP256": "prime256v1", "CurveP384": "secp384r1", "CurveP521": "secp521r1", "X25519": "X25519"}

SUITES: Final = {
    "TLS_ECDHE_ECDSA_WITH_AES_128_CBC_SHA": "ECDHE-ECDSA-AES128-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_256_CBC_SHA": "ECDHE-ECDSA-AES256-SHA",
    "TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA": "ECDHE-RSA-AES128-SHA",
    "TLS_ECDHE_RSA_WITH_AES_256_CBC_SHA": "ECDHE-RSA-AES256-SHA",
    "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256": "ECDHE-ECDSA-AES128-GCM-SHA256",
    "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384": "ECDHE-ECDSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256": "ECDHE-RSA-AES128-GCM-SHA256",
    "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384": "ECDHE-RSA-AES256-GCM-SHA384",
    "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-RSA-CHACHA20-POLY1305",
    "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256": "ECDHE-ECDSA-CHACHA20-POLY1305",
}
# Of TLS 1.3: always offered, as in the toolkit, whatever the list is.
SUITES_OF_13: Final = ("TLS_AES_128_GCM_SHA256", "TLS_AES_256_GCM_SHA384", "TLS_CHACHA20_POLY1305_SHA256")

HEADERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {  # name → its allowed values; (): any
        "Content-Security-Policy": (),
        "X-Frame-Options": ("deny", "sameorigin"),
        "X-Content-Type-Options": ("nosniff",),
        "X-XSS-Protection": (),
        "Strict-Transport-Security": (),
    }
)

CLIENT_AUTH: Final = ("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
UNVERIFIED: Final = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
HIGHEST_COST: Final = 18  # of bcrypt: seconds a login; every step doubles them
_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")


def _client_auth(value: str) -> str:
    if value in UNVERIFIED:
        raise mistake("lets in any certificate, which is not supported", "write RequireAndVerifyClientCert")
    if value not in CLIENT_AUTH:
        raise mistake("is unknown", f"write one of {', '.join(CLIENT_AUTH)}")
    return value


def _version(value: str) -> str:
    if value in BROKEN_VERSIONS:
        raise mistake("is a TLS version with known attacks, which is not supported", "write TLS12")
    if value not in VERSIONS:
        raise mistake("is unknown", f"write one of {', '.join(VERSIONS)}")
    return value


def _suite(value: str) -> str:
    if value not in SUITES and value not in SUITES_OF_13:
        near = get_close_matches(value.upper(), SUITES, n=1)
        instead = f"did you mean {near[0]}?" if near else "leave it out"
        raise mistake("is no suite of Go's tls.CipherSuites", instead)
    return value


def _curves(values: list[str]) -> list[str]:
    if not set(values) <= CURVES.keys():
        raise mistake("names a curve that is unknown", f"write one of {', '.join(CURVES)}")
    if len(values) > 1:
        raise mistake("can be one curve here, which is then the only one", "write one, or leave the key out for all")
    return values


def _header(value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise mistake("is not a valid header value", "write it on one line, in ASCII")
    return value


def _http2(value: bool) -> bool:
    if value:
        raise mistake("is not supported: the agent speaks HTTP/1 only", "write false, or leave the key out")
    return value


def _no_rate_limit(_: Any) -> Any:
    raise mistake("is not supported: connections and password checks are bounded anyway", "leave it out")


Version = Annotated[str, AfterValidator(_version)]
Suite = Annotated[str, AfterValidator(_suite)]
Header = Annotated[str, AfterValidator(_header)]


class StrictSection(Section):
    """A section in which an empty value is none either."""

    no_value: ClassVar[tuple[Any, ...]] = (None, "", [], {})


class TlsSection(StrictSection):
    """tls_server_config: a field for each key of the toolkit's, hence so many."""

    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    client_ca_file: str | None = None
    client_auth_type: Annotated[str, AfterValidator(_client_auth)] = "NoClientCert"
    client_allowed_sans: list[str] | None = None
    min_version: Version = "TLS12"
    max_version: Version = "TLS13"
    cipher_suites: list[Suite] | None = None
    curve_preferences: Annotated[list[str], AfterValidator(_curves)] | None = None
    prefer_server_cipher_suites: bool = True


class HttpSection(StrictSection):
    """http_server_config."""

    http2: Annotated[bool, AfterValidator(_http2)] = False
    headers: dict[str, Header] = Field(default_factory=dict)


class WebSection(StrictSection):
    """The whole file."""

    tls_server_config: TlsSection | None = None
    http_server_config: HttpSection = HttpSection()
    basic_auth_users: dict[str, str] | None = None
    rate_limit: Annotated[Any, AfterValidator(_no_rate_limit)] = None


FORMAT: Final = FileFormat(
    WebSection,
    "the file",
    "the file is empty; write tls_server_config, basic_auth_users or both",
    secret=True,
)


def entries(section: WebSection, source: Source) -> Iterator[Problem]:
    """What is wrong with headers and users beyond their types."""
    for name, value in section.http_server_config.headers.items():
        path: KeyPath = ("http_server_config", "headers", name)
        if name not in HEADERS:
            yield Problem(source.key_place(path), f"{FORMAT.label(path)} cannot be set; {', '.join(HEADERS)} can")
        elif HEADERS[name] and value and value not in HEADERS[name]:
            yield Problem(
                source.key_place(path), f"{FORMAT.label(path)} has no such value; write {' or '.join(HEADERS[name])}"
            )
    for name, hashed in (section.basic_auth_users or {}).items():
        path = ("basic_auth_users", name)
        if (text := _wrong_user(name, hashed)) is not None:
            yield Problem(source.key_place(path), f"{FORMAT.label(path)} {text}")


def _wrong_user(name: str, hashed: str) -> str | None:
    found = _HASH.fullmatch(hashed)
    if not name or ":" in name or not name.isprintable():
        return "is not a name that a client can send; write one without a colon"
    if found is None:
        return "has no bcrypt hash; write what `htpasswd -nBC 10 NAME` prints after the colon, in quotes"
    if not 4 <= int(found[1]) <= HIGHEST_COST:
        return f"has a hash of cost {found[1]}; make one of cost 10, or {HIGHEST_COST} at most"
    return None
