# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""A Snapshot as JSON: what gputop --json prints, --record writes and the agent's socket answers.

The document is {"version": 1, …the fields of agent.core.model.Snapshot…}, nested as the model nests, units in the
names. What is unknown is null. Mappings are objects (xids as decimal strings), enums their values, tuples arrays.

Invariant: from_json(to_json(s)) == s. Within a version fields are only added: a reader ignores what it does not know
and takes the model's default for what is not there, so that an older gputop reads a newer agent and vice versa.
The model itself is the schema (its type hints drive both directions), so the two cannot drift apart.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from agent.core.errors import WardenError
from agent.core.model import Snapshot

VERSION: Final = 1
_MOST: Final[Mapping[type, float]] = {int: 1 << 64, float: sys.float_info.max}  # of either sign: what can be shown

Json = dict[str, Any]
T = TypeVar("T")


class SchemaError(WardenError):
    """The text is not a snapshot of a version that this program reads."""


def to_json(snapshot: Snapshot) -> Json:
    """The snapshot as one JSON object."""
    return {"version": VERSION, **_encode(snapshot)}


def from_json(document: Any) -> Snapshot:
    """The snapshot of one JSON object. SchemaError says where it is wrong."""
    if not isinstance(document, dict) or "version" not in document:
        raise SchemaError("not a GPU Warden snapshot: it has no version")
    if document["version"] != VERSION:
        raise SchemaError(
            f"a snapshot of version {document['version']!r}, this program reads {VERSION}: use the same release of both"
        )
    return cast(Snapshot, _decoded(Snapshot, document, "snapshot"))


def dumps(snapshot: Snapshot) -> str:
    """One line of JSON, plain ASCII: names may hold anything, terminals and line readers do not."""
    return json.dumps(to_json(snapshot), separators=(",", ":"), allow_nan=False)


def loads(line: str | bytes) -> Snapshot:
    """The snapshot in one line of JSON."""
    try:
        return from_json(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"not JSON: {error}") from error


def encode(value: Any) -> Any:
    """Any value of frozen dataclasses and named tuples as JSON, encoded like the snapshot: for other documents."""
    return _encode(value)


def decode(kind: type[T], document: Any, name: str) -> T:
    """The opposite of `encode`. SchemaError says where it is wrong, beginning with `name`."""
    return cast(T, _decoded(kind, document, name))


def _encode(value: Any) -> Any:
    if value is None or type(value) in (int, str, bool):
        return value
    if isinstance(value, float):  # JSON has no inf and nan, and neither means anything that a reader could use
        return value if math.isfinite(value) else None
    kind: Any = type(value)
    if is_record(kind):
        return {name: _encode(getattr(value, name)) for name in record_fields(kind)}
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    return [_encode(item) for item in value]


@cache
def is_record(kind: Any) -> bool:
    """Whether it is an object in JSON: a dataclass, or a NamedTuple."""
    return is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"))


@cache
def record_fields(kind: Any) -> Mapping[str, bool]:
    """The names of its fields, and whether each may be left out."""
    if not is_dataclass(kind):
        return {name: name in kind._field_defaults for name in kind._fields}
    return {f.name: f.default is not MISSING or f.default_factory is not MISSING for f in fields(kind)}


Decoder = Callable[[Any], Any]


class _DecodeError(Exception):
    """What is wrong with a value. `steps`: the path to it, from the inside out; becomes part of a SchemaError."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.steps: list[str] = []


def _decoded(kind: Any, document: Any, name: str) -> Any:
    try:
        return _decoder(kind)(document)
    except _DecodeError as wrong:
        raise SchemaError(f"{name}{''.join(reversed(wrong.steps))}: {wrong}") from None


@cache
def _decoder(kind: Any) -> Decoder:
    """What turns JSON into a value of one type of the model."""
    origin, arguments = get_origin(kind), get_args(kind)
    if hasattr(kind, "__supertype__"):  # NewType
        return _decoder(kind.__supertype__)
    if origin in (Union, UnionType):
        (inner,) = (argument for argument in arguments if argument is not NoneType)
        return _optional(_decoder(inner))
    if origin is tuple:
        return _tuple(_decoder(arguments[0]))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(arguments[0], _decoder(arguments[1]))
    if is_record(kind):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _enum(kind)
    return _scalar(kind)


def _optional(inner: Decoder) -> Decoder:
    return lambda data: None if data is None else inner(data)


def _tuple(inner: Decoder) -> Decoder:
    def decode(data: Any) -> Any:
        _expect(list, data)
        made: list[Any] = []
        try:
            made.extend(map(inner, data))
        except _DecodeError as wrong:
            wrong.steps.append(f"[{len(made)}]")
            raise
        return tuple(made)

    return decode


def _mapping(key: Any, inner: Decoder) -> Decoder:
    to_key: Callable[[str], Any] = int if key is int else str

    def decode(data: Any) -> Any:
        _expect(dict, data)
        made, name = {}, ""
        try:
            for name, item in data.items():
                made[to_key(name)] = inner(item)
        except _DecodeError as wrong:
            wrong.steps.append(f".{name}")
            raise
        except ValueError as error:
            raise _DecodeError(str(error)) from error
        return made

    return decode


def _record(kind: Any) -> Decoder:
    hints = get_type_hints(kind)
    decoders = {name: _decoder(hints[name]) for name in record_fields(kind)}
    required = {name for name, is_optional in record_fields(kind).items() if not is_optional}

    def decode(data: Any) -> Any:
        _expect(dict, data)
        if missing := sorted(required - data.keys()):
            raise _DecodeError(f"{', '.join(missing)} missing")
        made, name = {}, ""
        try:
            for name, item in data.items():
                if (decoder := decoders.get(name)) is not None:
                    made[name] = decoder(item)
        except _DecodeError as wrong:
            wrong.steps.append(f".{name}")
            raise
        return kind(**made)

    return decode


def _enum(kind: type[StrEnum]) -> Decoder:
    def decode(data: Any) -> Any:
        try:
            return kind(data)
        except ValueError as error:
            raise _DecodeError(str(error)) from error

    return decode


def _scalar(kind: Any) -> Decoder:
    def decode(data: Any) -> Any:
        most = _MOST.get(type(data))
        if most is not None and not -most <= data <= most:  # which nan is not either
            raise _DecodeError(f"expected a number of 64 bits, found {data!r:.40}")
        if type(data) is kind:  # a bool is no int, either
            return data
        if kind is float and type(data) is int:
            return float(data)
        raise _DecodeError(f"expected {'a number' if kind is float else kind.__name__}, found {data!r:.40}")

    return decode


def _expect(kind: type, data: Any) -> None:
    if not isinstance(data, kind):
        raise _DecodeError(f"expected {kind.__name__}, found {data!r:.40}")
