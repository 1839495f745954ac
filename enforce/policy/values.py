# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Annotations for the values that a policy writes in another form than the agent uses: `Annotated[int, Duration(…)]`.

Booleans, words of a closed set and plain numbers need none of these: pydantic's bool, Literal and bounded int or float
say it all. Each annotation reads a value into base units, and says what to write instead where it cannot.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from agent.config.sections import JsonSchema, Notation, mistake, quote, unquoted_mistake
from enforce.policy.quantities import (
    DURATION_NS,
    SIZE_BYTES,
    UnitError,
    format_duration,
    format_ratio,
    format_size,
    parse_duration_ns,
    parse_ratio,
    parse_size_bytes,
    unit_pattern,
)

GLOB_MAX = 256
LONGEST_PATH = 64  # that the kernel compares: enforce.signals.http_probe
_HEX = re.compile(r"0[xX][0-9a-fA-F]{1,15}")
_OFFSET_END = 1 << 40
BUCKET_SUFFIX = "_bucket"


@dataclass(frozen=True)
class Duration(Notation):
    """ns, from `least` to `most` (both as they are written)."""

    example: str = "10s"
    least: str = "1us"
    most: str = "1h"

    def describe(self) -> str:
        return f"duration, {self.least} to {self.most}"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": unit_pattern(DURATION_NS)}

    def read(self, value: object) -> int:
        try:
            duration_ns = parse_duration_ns(value)
        except UnitError as error:
            raise mistake(error.what, error.instead) from None
        if not parse_duration_ns(self.least) <= duration_ns <= parse_duration_ns(self.most):
            raise mistake("is out of range", f"write {self.least} to {self.most}, such as {self.example}")
        return duration_ns

    def show(self, value: int) -> str:
        return format_duration(value)


@dataclass(frozen=True)
class Size(Notation):
    """Bytes, at least 1 MiB: less is a slip of the unit."""

    example: str = "40GiB"

    def describe(self) -> str:
        return "size, 1MiB or more"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": unit_pattern(SIZE_BYTES)}

    def read(self, value: object) -> int:
        try:
            size_bytes = parse_size_bytes(value)
        except UnitError as error:
            raise mistake(error.what, error.instead) from None
        if not 2**20 <= size_bytes < 2**50:
            raise mistake("is out of range", f"write 1MiB to 1023TiB, such as {self.example}")
        return size_bytes

    def show(self, value: int) -> str:
        return format_size(value)


@dataclass(frozen=True)
class Ratio(Notation):
    """0–1. `inside`: neither 0 nor 1 themselves. `above_zero`: not 0."""

    example: str = "5%"
    inside: bool = False
    above_zero: bool = False

    def describe(self) -> str:
        if self.inside:
            return "percentage or number, between 0 and 1, both excluded"
        return f"percentage or number, {'above 0, up to 1' if self.above_zero else '0 to 1'}"

    def json_schema(self) -> JsonSchema:
        least = {"exclusiveMinimum" if self.inside or self.above_zero else "minimum": 0}
        most = {"exclusiveMaximum" if self.inside else "maximum": 1}
        return {"anyOf": [{"type": "number", **least, **most}, {"type": "string", "pattern": unit_pattern(["%"])}]}

    def read(self, value: object) -> float:
        instead = f"write a number {self.describe().split(', ', 1)[1]}, such as {self.example}"
        try:
            ratio = parse_ratio(value)
        except UnitError as error:
            raise mistake(error.what, instead) from None
        if (ratio == 0 and (self.inside or self.above_zero)) or (ratio == 1 and self.inside):
            raise mistake("is out of range", instead)
        return ratio

    def show(self, value: float) -> str:
        return format_ratio(value)


@dataclass(frozen=True)
class Offset(Notation):
    """Bytes from the file's beginning, decimal or 0x…"""

    example: str = '"0x1a40"'

    def describe(self) -> str:
        return "bytes, decimal or 0x…"

    def json_schema(self) -> JsonSchema:
        hexadecimal = {"type": "string", "pattern": f"^{_HEX.pattern}$"}
        return {"anyOf": [{"type": "integer", "minimum": 1, "maximum": _OFFSET_END - 1}, hexadecimal]}

    def read(self, value: object) -> int:
        if isinstance(value, str) and _HEX.fullmatch(value):
            value = int(value, 16)
        if isinstance(value, bool) or not isinstance(value, int):
            raise mistake("is not an offset", f"write a whole number such as {self.example}")
        if not 0 < value < _OFFSET_END:
            raise mistake("is out of range", f"write where the function begins, such as {self.example}")
        return value

    def show(self, value: int) -> str:
        return hex(value)


@dataclass(frozen=True)
class Text(Notation):
    """A string that fits `pattern` as a whole, if there is one; `noun` and `instead` are for the message otherwise."""

    says: str
    example: str
    noun: str
    instead: str = "write one"
    pattern: str = ""
    longest: int = 1024
    printable: bool = True

    def describe(self) -> str:
        return self.says

    def json_schema(self) -> JsonSchema:
        pattern = {"pattern": f"^{self.pattern}$"} if self.pattern else {}
        return {"type": "string", **pattern, "minLength": 1, "maxLength": self.longest}

    def read(self, value: object) -> str:
        if isinstance(value, (bool, int, float)):
            raise mistake("is not text", f'put it in quotes: "{quote(value)}"')
        if isinstance(value, str) and len(value) > self.longest:
            raise mistake(f"has {len(value)} characters", f"write up to {self.longest}")
        if not isinstance(value, str) or not self._fits(value):
            raise mistake(f"is not {self.noun}", f"{self.instead} such as {self.example}")
        return value

    def _fits(self, value: str) -> bool:
        if self.printable and not value.isprintable():
            return False
        return re.fullmatch(self.pattern, value) is not None if self.pattern else bool(value)


GLOB = Text(
    "pattern, or a list of patterns of which one must match",
    '"chat-*"',
    "a pattern",
    instead="write text",
    longest=GLOB_MAX,
    printable=False,
)
URL = Text(
    "address, http or https",
    "http://127.0.0.1:8000/metrics",
    "an address to read from",
    pattern="[Hh][Tt][Tt][Pp][Ss]?://[!-~]+",
)
URL_PATH = Text("path that begins with /", "/v1/", "a request's path", "begin it with /,", "/[!-~]*", LONGEST_PATH)
STATUS_CLASSES = Text(
    "classes of HTTP statuses, separated by commas",
    "2xx,3xx",
    "a list of classes of statuses",
    "write some of 1xx to 5xx, separated by commas,",
    "[1-5]xx(, ?[1-5]xx)*",
    longest=64,
)
METRIC_NAME = Text(
    "name of a metric", "vllm:e2e_request_latency_seconds", "a metric's name", pattern="[A-Za-z_:][A-Za-z0-9_:]{0,254}"
)
FILE_PATH = Text("path that begins with /", "/usr/local/bin/server", "a file's full path", pattern="/(.*[^/])")
SYMBOL_NAME = Text(
    "name of a function", "handle_request", "a function's name", "write a name without spaces,", pattern="[^ ]+"
)


def rule_name(example: str) -> Text:
    """A rule's name: it becomes a metric label, so it is short and plain."""
    return Text(
        "name, up to 63 letters, digits, dots, dashes, underscores",
        example,
        "a name",
        instead="write up to 63 letters, digits, '.', '-', '_',",
        pattern="[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?",
        longest=63,
    )


def public_address(url: str) -> str:
    """A validator after URL: the address names a host, and holds no secret, as messages repeat it."""
    try:
        parts = urlsplit(url)
        known = bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is no number, or the brackets of an IPv6 address are not closed
        known = False
    if not known:
        raise mistake(f"is not {URL.noun}", f"write one such as {URL.example}")
    if "@" in parts.netloc or parts.fragment:
        raise unquoted_mistake("has a user name or a fragment", f"write one such as {URL.example}")
    return url


def whole_histogram(metric: str) -> str:
    """A validator after METRIC_NAME: the histogram, by the name that its HELP and TYPE lines have."""
    if metric.endswith(BUCKET_SUFFIX):
        raise mistake("is one of the histogram's series", f"write {metric.removesuffix(BUCKET_SUFFIX)}")
    return metric
