# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kinds of values that say where something is: an address, a file, a function, a metric."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from enforce.policy.kind import JsonSchema, Kind, mistake, quote

_METRIC = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,254}")
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,15}")
_MOST_TEXT = 1024
LONGEST_PATH = 64  # that the kernel compares: agent.http.layout
_MOST_OFFSET = 1 << 40
_SUFFIX = "_bucket"


def _text(value: object, example: str) -> str:
    """Text on one line, without spaces: what a name or an address is."""
    if isinstance(value, (bool, int, float)):
        raise mistake(f"{quote(value)} is not text", f'put it in quotes: "{quote(value)}"')
    if not isinstance(value, str) or not value or not value.isprintable() or " " in value:
        raise mistake(f"{quote(value)} is not a name or a place", f"write text without spaces, such as {example}")
    if len(value) > _MOST_TEXT:
        raise mistake(f"{quote(value)} has {len(value)} characters", f"write {_MOST_TEXT} at most")
    return value


@dataclass(frozen=True)
class Url(Kind):
    """http or https, with a host. Nothing that is a secret: the policy's errors quote it."""

    example: str = "http://127.0.0.1:8000/metrics"

    @property
    def says(self) -> str:
        return "address, http or https"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": "^[Hh][Tt][Tt][Pp][Ss]?://[^@#]+$", "maxLength": _MOST_TEXT}

    def read(self, value: object) -> str:
        url = _text(value, self.example)
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is no number, or the brackets of an IPv6 address are not closed
            known = False
        if not known or not url.isascii():
            raise mistake(f"{quote(url)} is not an address to read from", f"write one such as {self.example}")
        if "@" in parts.netloc or parts.fragment:
            raise mistake("an address with a user name or a # is not asked", f"write one such as {self.example}")
        return url


@dataclass(frozen=True)
class UrlPath(Kind):
    """How the path of a request begins."""

    example: str = "/v1/"

    @property
    def says(self) -> str:
        return "path that begins with /"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": "^/", "maxLength": LONGEST_PATH}

    def read(self, value: object) -> str:
        path = _text(value, self.example)
        if not path.startswith("/") or not path.isascii():
            raise mistake(f"{quote(path)} is not a request's path", f"begin it with /, such as {self.example}")
        if len(path) > LONGEST_PATH:
            raise mistake(f"{quote(path)} has {len(path)} characters", f"write the first {LONGEST_PATH} at most")
        return path


@dataclass(frozen=True)
class MetricName(Kind):
    """A histogram, by the name that its HELP and TYPE lines have."""

    example: str = "vllm:e2e_request_latency_seconds"

    @property
    def says(self) -> str:
        return "name of a metric"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": f"^{_METRIC.pattern}$", "not": {"pattern": f"{_SUFFIX}$"}}

    def read(self, value: object) -> str:
        name = _text(value, self.example)
        if _METRIC.fullmatch(name) is None:
            raise mistake(f"{quote(name)} is not a metric's name", f"write one such as {self.example}")
        if name.endswith(_SUFFIX):
            raise mistake(f"{quote(name)} is one of the histogram's series", f"write {name.removesuffix(_SUFFIX)}")
        return name


@dataclass(frozen=True)
class FilePath(Kind):
    """A file, from the root that the container sees."""

    example: str = "/usr/local/bin/server"

    @property
    def says(self) -> str:
        return "path that begins with /"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": "^/(.*[^/])?$", "minLength": 2, "maxLength": _MOST_TEXT}

    def read(self, value: object) -> str:
        if not isinstance(value, str) or not value.startswith("/") or not value.isprintable() or value.endswith("/"):
            raise mistake(f"{quote(value)} is not a file's full path", f"write one such as {self.example}")
        if len(value) > _MOST_TEXT:
            raise mistake(f"{quote(value)} has {len(value)} characters", f"write {_MOST_TEXT} at most")
        return value


@dataclass(frozen=True)
class SymbolName(Kind):
    """A function, as the linker knows it."""

    example: str = "handle_request"

    @property
    def says(self) -> str:
        return "name of a function"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "minLength": 1, "maxLength": _MOST_TEXT}

    def read(self, value: object) -> str:
        return _text(value, self.example)


@dataclass(frozen=True)
class Offset(Kind):
    """Bytes from the file's beginning, decimal or 0x…"""

    example: str = '"0x1a40"'

    @property
    def says(self) -> str:
        return "bytes, decimal or 0x…"

    def json_schema(self) -> JsonSchema:
        hexadecimal = {"type": "string", "pattern": f"^{_HEX.pattern}$"}
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": _MOST_OFFSET - 1}, hexadecimal]}

    def read(self, value: object) -> int:
        if isinstance(value, str) and _HEX.fullmatch(value):
            value = int(value, 16)
        if isinstance(value, bool) or not isinstance(value, int):
            raise mistake(f"{quote(value)} is not an offset", f"write a whole number such as {self.example}")
        if not 0 < value < _MOST_OFFSET:
            raise mistake(f"{quote(value)} is out of range", f"write where the function begins, such as {self.example}")
        return value

    def show(self, value: int) -> str:
        return hex(value)
