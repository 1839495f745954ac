# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What a kind of value is: it reads, it shows, and it says what to write instead.

Each kind is used as `Annotated[T, SomeKind(...)]`: pydantic calls `read`, the reference prints `says`, editors get
`json_schema`. `read` raises `mistake(...)`, never ValueError: pydantic's own wording never reaches a user.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic_core import CoreSchema, PydanticCustomError, core_schema

JsonSchema = dict[str, Any]


def quote(value: object) -> str:
    """A value as people wrote it, on one line and not endless."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None:
        return "empty"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def scalar(text: str) -> Any:
    """What a value that people write is to JSON: 20 a number, 50ms text, as is whatever is in quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def mistake(what: str, instead: str) -> PydanticCustomError:
    """The error that all kinds raise: `what` is wrong, and what to write `instead`."""
    return PydanticCustomError("mistake", "{what}; {instead}", {"what": what, "instead": instead})


class Kind:
    """A kind of value. `says` and `example` are for the reference and for messages."""

    @property
    def says(self) -> str:
        raise NotImplementedError

    @property
    def example(self) -> str:
        raise NotImplementedError

    def read(self, value: object) -> object:
        """The value in base units; raises `mistake`."""
        raise NotImplementedError

    def json_schema(self) -> JsonSchema:
        """What JSON Schema can say of it: whatever `read` takes fits, but not all that fits is in range."""
        raise NotImplementedError

    def show(self, value: Any) -> str:
        """A value in base units as people write it."""
        return str(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> JsonSchema:
        return {**self.json_schema(), "examples": [scalar(self.example)]}
