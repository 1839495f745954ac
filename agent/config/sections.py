# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Sections of a configuration file as pydantic models, and what their annotations say about each key.

`Section` refuses unknown keys and keys without a value. A value is annotated with pydantic's own types where these
suffice (bool, Literal, int and float with bounds) and with a `Notation` where people write it in another form than the
program uses, such as 50ms. Messages, the reference page and the JSON Schema all ask here what a key holds, so that
none of them repeats the schema.

Each mistake has a position and says what to write instead, and is reported once: a misspelt required key is not also
reported as missing, nor is a value that the YAML reader had to drop. Where the file may hold secrets no message repeats
a value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Generic, Literal, TypeVar, cast, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, PydanticUndefined, core_schema

from agent.config import yaml_source
from agent.config.yaml_source import KeyPath, Problem, Source, YamlPosition

JsonSchema = dict[str, Any]
_PLAIN_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]{0,59}")
_OUT_OF_RANGE = {"greater_than_equal", "less_than_equal", "finite_number"}
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


S = TypeVar("S", bound=Section)


@dataclass(frozen=True, slots=True)
class FileFormat(Generic[S]):
    """One kind of configuration file: its schema and the words that its messages use."""

    root: type[S]
    name: str  # of the whole, as a message's subject: "the policy"
    empty: str  # the message for a file without content
    secret: bool = False  # values are not repeated in messages, and problems are at keys: a width tells a length

    def parse(self, text: str) -> tuple[S | None, Source, list[Problem]]:
        """The validated sections, None where there are problems that pydantic or the YAML reader found."""
        source = yaml_source.read(text)
        problems = list(source.problems)
        if source.data is None:
            return None, source, problems or [Problem(YamlPosition(), self.empty)]
        try:
            return self.root.model_validate(source.data), source, problems
        except ValidationError as error:
            return None, source, problems + self._problems(error.errors(include_url=False), source)

    def label(self, path: KeyPath) -> str:
        """('online', 0, 'slo') → online[0].slo; () → the name of the whole."""
        steps = (f"[{step}]" if isinstance(step, int) else f".{_plain(step)}" for step in path)
        return "".join(steps).removeprefix(".") or self.name

    def _problems(self, errors: list[ErrorDetails], source: Source) -> list[Problem]:
        """One Problem for each mistake that pydantic found."""
        misspelt = {near for error in errors if _is_unknown_key(error) and (near := self._meant(error["loc"]))}
        kept = [error for error in errors if not (error["type"] == "missing" and error["loc"] in misspelt)]
        return [
            Problem(self.position(error["loc"], source, _is_unknown_key(error)), self._text(error))
            for error in kept
            if error["loc"] not in source.broken
        ]

    def position(self, path: KeyPath, source: Source, at_key: bool = False) -> YamlPosition:
        """Of the value at a path; of its key for an unknown key, and in a file that may hold secrets."""
        return source.key_place(path) if at_key or self.secret else source.place(path)

    def _text(self, error: ErrorDetails) -> str:
        path: KeyPath = error["loc"]
        if error["type"] == "missing":
            return self._missing(path)
        if _is_unknown_key(error):
            return self._unknown_key(path)
        label, value = self.label(path), error["input"]
        subject = label if self.secret or error["type"] == UNQUOTED_MISTAKE else f"{label}: {quote(value)}"
        return f"{subject} {self.what(error)}"

    def what(self, error: ErrorDetails) -> str:
        """What is wrong with a value, and what to write instead."""
        path, kind = error["loc"], error["type"]
        section, info = self.section_at(path), self._field_at(path)
        match kind:
            case "string_type":
                return "is not text; write it in quotes"
            case "bool_type":
                return "is neither true nor false; write true or false, without quotes"
            case "list_type":
                return "is not a list; write entries that begin with '- ' below it"
            case "model_type" | "dict_type":
                keys = f"the keys {', '.join(section.model_fields)}" if section else "its entries as name: value"
                return f"is not a mapping; write {keys} below it, indented"
            case "literal_error" if info is not None:
                return _not_among(choices(info), error["input"])
            case "int_type" | "float_type" if info is not None:
                noun = "whole number" if kind == "int_type" else "number"
                return f"is not a {noun}; write one such as {example(info)}"
            case _ if kind in _OUT_OF_RANGE and info is not None:
                return f"is out of range; write a number from {bounds(info)}"
            case _:
                return error["msg"]

    def _missing(self, path: KeyPath) -> str:
        key, parent = str(path[-1]), self.label(path[:-1])
        info = self._field_at(path)
        inner = section_of(info) if info else None
        if inner is not None:
            return f"{parent} has no {key}; write {key}: with the keys {', '.join(inner.model_fields)} below it"
        return f"{parent} has no {key}; write {key}: {example(info) if info else '...'}"

    def _unknown_key(self, path: KeyPath) -> str:
        meant = self._meant(path)
        section = self.section_at(path[:-1])
        cure = f"write one of: {', '.join(section.model_fields) if section else ''}"
        if meant is not None:
            cure = f"did you mean {meant[-1]}?" if len(meant) == len(path) else f"write it below {meant[-2]}"
        return f"{self.label(path)}: unknown key; {cure}"

    def _meant(self, path: KeyPath) -> KeyPath | None:
        """The path with the nearest key that the section knows, or of the same key in a section below it."""
        section = self.section_at(path[:-1])
        if section is None:
            return None
        for key, info in section.model_fields.items():
            inner = section_of(info)
            if inner is not None and not is_list(info) and path[-1] in inner.model_fields:
                return (*path[:-1], key, path[-1])
        near = get_close_matches(str(path[-1]).lower(), list(section.model_fields), n=1, cutoff=0.6)
        return (*path[:-1], near[0]) if near else None

    def section_at(self, path: KeyPath) -> type[Section] | None:
        """The section that describes the mapping at `path`; None where there is none (a scalar, a label)."""
        section: type[Section] | None = self.root
        for step in path:
            if isinstance(step, str):
                info = section.model_fields.get(step) if section is not None else None
                section = section_of(info) if info is not None else None
        return section

    def _field_at(self, path: KeyPath) -> FieldInfo | None:
        """The key that holds the value at `path`, itself or in a list."""
        while path and isinstance(path[-1], int):
            path = path[:-1]
        section = self.section_at(path[:-1]) if path else None
        return section.model_fields.get(str(path[-1])) if section is not None else None


def value_mistake(section: type[Section], key: str, value: object) -> str | None:
    """What is wrong with one value of a key that comes from elsewhere than a file; None: nothing."""
    try:
        section.model_validate({key: value})
    except ValidationError as error:
        found = (one for one in error.errors(include_url=False) if one["loc"][0] == key and one["type"] != "missing")
        if (wrong := next(found, None)) is not None:
            what = FileFormat(section, key, "").what(wrong)
            return what if wrong["type"] == UNQUOTED_MISTAKE else f"{quote(wrong['input'])} {what}"
    return None


def _is_unknown_key(error: ErrorDetails) -> bool:
    return error["type"] == "extra_forbidden"


def _not_among(known: tuple[object, ...], value: object) -> str:
    words = [str(one) for one in known]
    near = get_close_matches(value, words, n=1) if isinstance(value, str) else []
    meant = f"did you mean {near[0]}? " if near else ""
    return f"is unknown; {meant}write one of: {', '.join(words)}"


def _plain(key: str) -> str:
    return key if _PLAIN_KEY.fullmatch(key) else quote(key)


class SchemaGenerator(GenerateJsonSchema):
    """JSON Schema of sections: keys are there or not, never null; defaults are shown as people write them."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        made = super().model_schema(schema)
        made.pop("title")
        section = cast(type[Section], schema["cls"])
        for key, info in section.model_fields.items():
            shown = made["properties"][key]
            if info.default not in (PydanticUndefined, None, []):
                shown["default"] = info.default if is_list(info) else scalar(show(info, info.default))
            if shown.get("type") not in (None, "array", "object", "boolean") or "pattern" in str(shown.get("anyOf")):
                shown["examples"] = [scalar(example(info))]
        return made
