# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""pydantic's errors as problems: where in the file, what is wrong, what to write instead.

One mistake is one problem: a misspelt required key is not also reported as missing, nor a value that the YAML lost.
"""

from __future__ import annotations

from difflib import get_close_matches

from pydantic_core import ErrorDetails

from agent.yaml_source import Path, Place, Problem, Source
from enforce.policy.kind import quote
from enforce.policy.sections import is_list, kind_of, section_at, section_of


def label(path: Path) -> str:
    """('online', 0, 'slo') → online[0].slo; () → the policy."""
    steps = (f"[{step}]" if isinstance(step, int) else f".{_plain(step)}" for step in path)
    return "".join(steps).removeprefix(".") or "the policy"


def complaints(errors: list[ErrorDetails], source: Source) -> list[Problem]:
    """One Problem for each mistake that pydantic found."""
    misspelt = {near for error in errors if error["type"] == "extra_forbidden" and (near := _meant(error["loc"]))}
    told = [error for error in errors if not (error["type"] == "missing" and error["loc"] in misspelt)]
    told = [error for error in told if error["loc"] not in source.broken]
    return [Problem(_place(error, source), _text(error)) for error in told]


def _place(error: ErrorDetails, source: Source) -> Place:
    unknown = error["type"] == "extra_forbidden"
    return source.key_place(error["loc"]) if unknown else source.place(error["loc"])


def _text(error: ErrorDetails) -> str:
    path: Path = error["loc"]
    match error["type"]:
        case "missing":
            return _missing(path)
        case "extra_forbidden":
            return _unknown_key(path)
        case "model_type" | "dict_type":
            section = section_at(path)
            keys = ", ".join(section.model_fields) if section else "name: value"
            return f"{label(path)}: {quote(error['input'])} is not a mapping; write the keys {keys} below it"
        case "list_type":
            return f"{label(path)}: {quote(error['input'])} is not a list; write entries that begin with '- '"
        case _:
            return f"{label(path)}: {error['msg']}"


def _missing(path: Path) -> str:
    key = str(path[-1])
    section = section_at(path[:-1])
    info = section.model_fields[key] if section else None
    kind = kind_of(info) if info else None
    inner = section_of(info) if info else None
    if inner is not None:
        return f"{label(path[:-1])} has no {key}; write {key}: with the keys {', '.join(inner.model_fields)} below it"
    return f"{label(path[:-1])} has no {key}; write {key}: {kind.example if kind else '...'}"


def _unknown_key(path: Path) -> str:
    meant = _meant(path)
    section = section_at(path[:-1])
    known = ", ".join(section.model_fields) if section else ""
    cure = f"write one of: {known}"
    if meant is not None:
        cure = f"did you mean {meant[-1]}?" if len(meant) == len(path) else f"write it below {meant[-2]}"
    return f"{label(path[:-1])}: the key {_plain(str(path[-1]))} is unknown; {cure}"


def _meant(path: Path) -> Path | None:
    """The path with the nearest key that the section knows, or of the same key in a section below it."""
    section = section_at(path[:-1])
    if section is None:
        return None
    for key, info in section.model_fields.items():
        inner = section_of(info)
        if inner is not None and not is_list(info) and path[-1] in inner.model_fields:
            return (*path[:-1], key, path[-1])
    near = get_close_matches(str(path[-1]).lower(), list(section.model_fields), n=1, cutoff=0.6)
    return (*path[:-1], near[0]) if near else None


def _plain(key: str) -> str:
    return key if key.isidentifier() and key.isascii() and len(key) <= 60 else quote(key)
