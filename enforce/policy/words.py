# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The kinds of values that are text, or a yes and no."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from enforce.policy.kind import JsonSchema, Kind, mistake, quote

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
GLOB_MAX = 256


@dataclass(frozen=True)
class Flag(Kind):
    """true or false. Not yes, on or 1: YAML versions disagree on what those mean."""

    example: str = "true"

    @property
    def says(self) -> str:
        return "true or false"

    def json_schema(self) -> JsonSchema:
        return {"type": "boolean"}

    def read(self, value: object) -> bool:
        if not isinstance(value, bool):
            raise mistake(f"{quote(value)} is neither true nor false", "write true or false, without quotes")
        return value

    def show(self, value: bool) -> str:
        return "true" if value else "false"


@dataclass(frozen=True)
class Word(Kind):
    """One of `known`."""

    known: tuple[str, ...]

    @property
    def example(self) -> str:
        return self.known[0]

    @property
    def says(self) -> str:
        return f"one of {', '.join(self.known)}"

    def json_schema(self) -> JsonSchema:
        return {"enum": list(self.known)}

    def read(self, value: object) -> str:
        if isinstance(value, str) and value in self.known:
            return value
        near = get_close_matches(value, self.known, n=1) if isinstance(value, str) else []
        meant = f"did you mean {near[0]}? " if near else ""
        raise mistake(f"{quote(value)} is unknown", f"{meant}write one of: {', '.join(self.known)}")


@dataclass(frozen=True)
class Glob(Kind):
    """A shell pattern: *, ?, [abc]; case counts."""

    example: str = '"chat-*"'

    @property
    def says(self) -> str:
        return "pattern, or a list of patterns of which one must match"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "minLength": 1, "maxLength": GLOB_MAX}

    def read(self, value: object) -> str:
        if isinstance(value, (bool, int, float)):
            raise mistake(f"{quote(value)} is not text", f'put it in quotes: "{quote(value)}"')
        if not isinstance(value, str):
            raise mistake(f"{quote(value)} is not a pattern", f"write text such as {self.example}")
        if not 0 < len(value) <= GLOB_MAX:
            raise mistake(f"{quote(value)} has {len(value)} characters", f"write 1 to {GLOB_MAX}, or leave the key out")
        return value


@dataclass(frozen=True)
class Name(Kind):
    """A rule's name: it becomes a metric label, so it is short and plain."""

    example: str = "chat"

    @property
    def says(self) -> str:
        return "name, up to 63 letters, digits, dots, dashes, underscores"

    def json_schema(self) -> JsonSchema:
        return {"type": "string", "pattern": f"^{_NAME.pattern}$"}

    def read(self, value: object) -> str:
        if isinstance(value, (bool, int, float)):
            raise mistake(f"{quote(value)} is not text", f'put it in quotes: "{quote(value)}"')
        if not isinstance(value, str) or _NAME.fullmatch(value) is None:
            instead = f"write up to 63 letters, digits, '.', '-', '_', such as {self.example}"
            raise mistake(f"{quote(value)} is not a name", instead)
        return value
