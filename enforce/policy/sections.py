# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Looking into the schema: which section a path leads to, and of what kind a key is.

Messages and the reference both ask here, so that neither repeats the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

from pydantic.fields import FieldInfo

from enforce.policy.kind import Kind
from enforce.policy.schema import PolicySection, Section
from enforce.policy.source import Path


def section_at(path: Path) -> type[Section] | None:
    """The section that describes the mapping at `path`; None where there is none (a scalar, a label)."""
    section: type[Section] | None = PolicySection
    for step in path:
        if isinstance(step, str):
            info = section.model_fields.get(step) if section is not None else None
            section = section_of(info) if info is not None else None
    return section


def section_of(info: FieldInfo) -> type[Section] | None:
    """The section that a key holds, or holds a list of."""
    types = (part for part in _parts(info.annotation) if isinstance(part, type))
    return next((part for part in types if issubclass(part, Section)), None)


def kind_of(info: FieldInfo) -> Kind | None:
    """The kind of a key's value, or of the entries of its list."""
    return next((part for part in (*info.metadata, *_parts(info.annotation)) if isinstance(part, Kind)), None)


def kind_at(section: type[Section], key: str) -> Kind:
    """The kind of a key that has one, as all but those of sections within have."""
    kind = kind_of(section.model_fields[key])
    assert kind is not None, key
    return kind


def is_list(info: FieldInfo) -> bool:
    """Whether the key wants a YAML list (patterns do not: one of them stands for a list of one)."""
    return getattr(info.annotation, "__origin__", None) is list


def _parts(annotation: Any) -> Iterator[Any]:
    yield annotation
    for argument in (*get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from _parts(argument)
