# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Sections of a configuration file as pydantic models, and what their annotations say about each key.

`Section` refuses unknown keys and keys without a value. A value is annotated with pydantic's own types where these
suffice (bool, Literal, int and float with bounds) and with a `Notation` where people write it in another form than the
program uses, such as 50ms. Messages, the reference page and the JSON Schema all ask here what a key holds, so that
none of them repeats the schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

JsonSchema = dict[str, Any]
MISTAKE = "mistake"
UNQUOTED_MISTAKE = "unquoted_mistake"


def mistake(what: str, instead: str) -> PydanticCustomError:
    """The error that validators raise: the value `what` (a verb first); `instead`, what to write."""
    return PydanticCustomError(MISTAKE, "{what}; {instead}", {"what": what, "instead": instead})


def unquoted_mistake(what: str, instead: str) -> PydanticCustomError:
    """As `mistake`, of a value that must not be repeated or has nothing to show: the message names the key only."""
    return PydanticCustomError(UNQUOTED_MISTAKE, "{what}; {instead}", {"what": what, "instead": instead})


def quote(value: object) -> str:
    """A value as it is written, on one line of at most 60 characters."""
    if isinstance(value, (dict, list)):
        return "a mapping" if isinstance(value, dict) else "a list"
    if value is None:
        return "empty"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def scalar(text: str) -> Any:
    """The JSON value of a written value: 20 is a number, 50ms a string, and so is whatever is in quotes."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class Section(BaseModel):
    """A mapping of the file. Unknown keys, keys without a value and values of another type are refused.

    `no_value` are the values that count as none: `memory:` is a slip, not "no limit".
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    no_value: ClassVar[tuple[Any, ...]] = (None,)

    @field_validator("*", mode="before")
    @classmethod
    def _has_value(cls, value: Any) -> Any:
        if value in cls.no_value:
            raise unquoted_mistake("has no value", "write one or leave the key out")
        return value


class Notation:
    """An annotation for a value that is written in another form than it is used: 50ms for nanoseconds."""

    example: str  # a right value as it is written

    def describe(self) -> str:
        """What to write, for the reference: a noun, then its bounds."""
        raise NotImplementedError

    def read(self, value: object) -> object:
        """The value in base units; raises `mistake`."""
        raise NotImplementedError

    def json_schema(self) -> JsonSchema:
        """What JSON Schema can express: whatever `read` accepts is valid, but not all that is valid is in range."""
        raise NotImplementedError

    def show(self, value: Any) -> str:
        """A value in base units as it is written."""
        return str(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self.read)

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> JsonSchema:
        return self.json_schema()


def section_of(info: FieldInfo) -> type[Section] | None:
    """The section that a key holds, or holds a list of."""
    types = (part for part in parts(info.annotation) if isinstance(part, type))
    return next((part for part in types if issubclass(part, Section)), None)


def is_list(info: FieldInfo) -> bool:
    """Whether the key needs a YAML list (patterns do not: one of them stands for a list of one)."""
    return get_origin(info.annotation) is list


def notation(info: FieldInfo) -> Notation | None:
    """The notation of a key's value, or of the entries of its list; None where pydantic's own type says it all."""
    return next((part for part in _annotations(info) if isinstance(part, Notation)), None)


def choices(info: FieldInfo) -> tuple[Any, ...]:
    """The values that a Literal allows; empty for other types."""
    return next((get_args(part) for part in parts(info.annotation) if get_origin(part) is Literal), ())


def bounds(info: FieldInfo) -> str:
    """The range of a number: 1 to 65535."""
    ends: dict[type, Any] = {type(part): part for part in _annotations(info)}
    return f"{ends[Ge].ge:g} to {ends[Le].le}"


def describe(info: FieldInfo) -> str:
    """What to write for a key's value, or for the entries of its list; empty for a section."""
    if (written := notation(info)) is not None:
        return written.describe()
    if known := choices(info):
        return f"one of {', '.join(known)}" if len(known) > 1 else f"the number {known[0]}"
    types = set(parts(info.annotation))
    if bool in types:
        return "true or false"
    if types & {int, float}:
        return f"{'whole number' if int in types else 'number'}, {bounds(info)}"
    return ""


def example(info: FieldInfo) -> str:
    """A right value of the key as it is written."""
    if (written := notation(info)) is not None:
        return written.example
    if info.examples:
        return str(info.examples[0])
    return str(next(iter(choices(info)), "true" if bool in parts(info.annotation) else "..."))


def show(info: FieldInfo, value: Any) -> str:
    """A value of the key, in base units, as it is written."""
    if isinstance(value, list):
        return f"[{', '.join(show(info, item) for item in value)}]"
    if (written := notation(info)) is not None:
        return written.show(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def parts(annotation: Any) -> Iterator[Any]:
    """A type and all that it is made of, the metadata of Annotated included."""
    yield annotation
    if get_origin(annotation) is not Literal:
        for argument in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
            yield from parts(argument)


def _annotations(info: FieldInfo) -> Iterator[Any]:
    for part in (*info.metadata, *parts(info.annotation)):
        yield from part.metadata if isinstance(part, FieldInfo) else (part,)
