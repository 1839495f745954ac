# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Protobuf message classes from tables of fields, so that nothing has to be generated when the product is built.

Only the fields that are read or written are declared; protobuf skips the others of a message that it parses. So one
table serves every version of an API whose field numbers agree. All messages are of proto3: numbers that repeat are
packed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

MAP: Final = "map<string, string>"

# Number, name and kind: a scalar ("string", "int64", …), MAP, or the name of a message; "*" before it: repeated.
Fields = tuple[tuple[int, str, str], ...]

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "string": _Field.TYPE_STRING,
    "int64": _Field.TYPE_INT64,
    "uint64": _Field.TYPE_UINT64,
    "bool": _Field.TYPE_BOOL,
}


def message_classes(package: str, messages: Mapping[str, Fields]) -> Mapping[str, Any]:
    """The class of each message, by name."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for number, field, kind in fields:
            _add_field(package, message, number, field, kind)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in messages}


def _add_field(package: str, message: Any, number: int, name: str, kind: str) -> None:
    """`message`: the DescriptorProto that is being made."""
    field = message.field.add(name=name, number=number, label=_Field.LABEL_OPTIONAL)
    if kind.startswith("*"):
        kind, field.label = kind[1:], _Field.LABEL_REPEATED
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    if kind == MAP:
        field.label = _Field.LABEL_REPEATED
        entry = message.nested_type.add(name=f"{name.title()}Entry")
        entry.options.map_entry = True
        for index, part in enumerate(("key", "value"), 1):
            entry.field.add(name=part, number=index, label=_Field.LABEL_OPTIONAL, type=_Field.TYPE_STRING)
        kind = f"{message.name}.{entry.name}"
    field.type, field.type_name = _Field.TYPE_MESSAGE, f".{package}.{kind}"
