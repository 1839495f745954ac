# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The keys of a web configuration, and what is said where one is wrong.

Invariant: no message quotes what may be a secret: a key, or a hash of a password.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from agent.names import printable
from agent.webconfig.suites import BROKEN_VERSIONS, CURVES, SUITES, SUITES_OF_13, VERSIONS
from agent.yaml_source import Path, Problem, Source

HEADERS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {  # name → the values that it may have; (): any
        "Content-Security-Policy": (),
        "X-Frame-Options": ("deny", "sameorigin"),
        "X-Content-Type-Options": ("nosniff",),
        "X-XSS-Protection": (),
        "Strict-Transport-Security": (),
    }
)
CLIENT_AUTH: Final = ("NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert")
UNVERIFIED: Final = ("RequestClientCert", "RequireAnyClientCert", "RequireClientCert")
DEAREST: Final = 18  # seconds a login; every step doubles them
_HASH: Final = re.compile(r"\$2[aby]\$(\d\d)\$[./A-Za-z0-9]{53}")
_SAID: Final = {
    "string_type": "is not text; write it in quotes",
    "bool_type": "is neither true nor false; write one of them, without quotes",
    "list_type": "is not a list; write entries that begin with '- ' below it",
    "model_type": "is not a mapping; write its keys below it, indented",
    "dict_type": "is not a mapping; write its keys below it, indented",
}


def mistake(text: str) -> PydanticCustomError:
    """What is wrong; what to write instead."""
    return PydanticCustomError("mistake", "{text}", {"text": text})


def _client_auth(value: str) -> str:
    if value in UNVERIFIED:
        raise mistake("lets in any certificate and is not done here; write RequireAndVerifyClientCert")
    if value not in CLIENT_AUTH:
        raise mistake(f"is unknown; write one of {', '.join(CLIENT_AUTH)}")
    return value


def _version(value: str) -> str:
    if value in BROKEN_VERSIONS:
        raise mistake("is a version of TLS that is broken and not spoken here; write TLS12")
    if value not in VERSIONS:
        raise mistake(f"is unknown; write one of {', '.join(VERSIONS)}")
    return value


def _suite(value: str) -> str:
    if value not in SUITES and value not in SUITES_OF_13:
        near = get_close_matches(value.upper(), SUITES, n=1)
        raise mistake(f"is no suite of Go's tls.CipherSuites; {_meant(near) or 'leave it out'}")
    return value


def _curves(values: list[str]) -> list[str]:
    if not set(values) <= CURVES.keys():
        raise mistake(f"names a curve that is unknown; write one of {', '.join(CURVES)}")
    if len(values) > 1:
        raise mistake("can be one curve here, which is then the only one; write one, or leave the key out for all")
    return values


def _header(value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise mistake("can be no header's value; write it on one line, in ASCII")
    return value


def _http2(value: bool) -> bool:
    if value:
        raise mistake("cannot be done: the agent speaks HTTP/1 only; write false, or leave the key out")
    return value


def _no_rate_limit(_: Any) -> Any:
    raise mistake("is not done here: connections and looks at passwords are bounded as it is; leave it out")


Version = Annotated[str, AfterValidator(_version)]
Suite = Annotated[str, AfterValidator(_suite)]
Header = Annotated[str, AfterValidator(_header)]


class Section(BaseModel):
    """Unknown keys are refused, and values of another kind than they are to be."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _has_value(cls, value: Any) -> Any:
        if value is None or value in ("", [], {}):
            raise mistake("has no value; write one or leave the key out")
        return value


class TlsSection(Section):
    """tls_server_config."""

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


class HttpSection(Section):
    """http_server_config."""

    http2: Annotated[bool, AfterValidator(_http2)] = False
    headers: dict[str, Header] = {}


class WebSection(Section):
    """The whole file."""

    tls_server_config: TlsSection | None = None
    http_server_config: HttpSection = HttpSection()
    basic_auth_users: dict[str, str] | None = None
    rate_limit: Annotated[Any, AfterValidator(_no_rate_limit)] = None


_SECTIONS: Final[Mapping[Path, type[Section]]] = MappingProxyType(
    {(): WebSection, ("tls_server_config",): TlsSection, ("http_server_config",): HttpSection}
)


def complaints(error: ValidationError, source: Source) -> list[Problem]:
    """One for each mistake that pydantic found."""
    found = [one for one in error.errors(include_url=False) if one["loc"] not in source.broken]
    return [Problem(source.key_place(one["loc"]), _text(one)) for one in found]


def entries(section: WebSection, source: Source) -> Iterator[Problem]:
    """What is wrong with single headers and users."""
    for name, value in section.http_server_config.headers.items():
        path: Path = ("http_server_config", "headers", name)
        if name not in HEADERS:
            yield Problem(source.key_place(path), f"{label(path)} cannot be set; {', '.join(HEADERS)} can")
        elif HEADERS[name] and value and value not in HEADERS[name]:
            yield Problem(
                source.key_place(path), f"{label(path)} has no such value; write {' or '.join(HEADERS[name])}"
            )
    for name, hashed in (section.basic_auth_users or {}).items():
        path = ("basic_auth_users", name)
        if (text := _wrong_user(name, hashed)) is not None:
            yield Problem(source.key_place(path), f"{label(path)} {text}")


def _wrong_user(name: str, hashed: str) -> str | None:
    found = _HASH.fullmatch(hashed)
    if not name or ":" in name or not name.isprintable():
        return "is no name that can be sent; write one without a colon"
    if found is None:
        return "has no bcrypt hash; write what `htpasswd -nBC 10 NAME` prints after the colon, in quotes"
    if not 4 <= int(found[1]) <= DEAREST:
        return f"has a hash of cost {found[1]}; make one of cost 10, or {DEAREST} at most"
    return None


def label(path: Path) -> str:
    """('tls_server_config', 'cipher_suites', 0) → tls_server_config.cipher_suites[0]."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{printable(step, 60)}" for step in path)
    return "".join(steps).removeprefix(".") or "the file"


def _text(error: ErrorDetails) -> str:
    path: Path = error["loc"]
    if error["type"] == "extra_forbidden":
        known = [*_SECTIONS[path[:-1]].model_fields]
        near = get_close_matches(str(path[-1]), known, n=1)
        return f"{label(path)} is no key of it; {_meant(near) or 'write one of ' + ', '.join(known)}"
    return f"{label(path)} {_SAID.get(error['type'], error['msg'])}"


def _meant(near: list[str]) -> str:
    return f"did you mean {near[0]}?" if near else ""
