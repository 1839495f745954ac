# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Snapshots survive JSON, whatever is in them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.errors import SetupError
from agent.core.model import CollectorHealth, Snapshot
from agent.core.snapshot_json import VERSION, SchemaError, dumps, from_json, is_record, loads, record_fields, to_json
from agent.tui.recording import opened
from tests.support.snapshots import rich_snapshot
from tools.manual import snapshot_reference


def made_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value of a type of the model, small."""
    arguments = [argument for argument in get_args(kind) if argument not in (NoneType, ...)]
    origin = get_origin(kind)
    if hasattr(kind, "__supertype__"):
        return made_of(kind.__supertype__)
    if origin is tuple:
        return st.lists(made_of(arguments[0]), max_size=2).map(tuple)
    if origin is Mapping:
        return st.dictionaries(made_of(arguments[0]), made_of(arguments[1]), max_size=2)
    if origin is not None:
        return st.none() | made_of(arguments[0])
    if is_record(kind):
        hints = get_type_hints(kind)
        return st.builds(kind, **{name: made_of(hints[name]) for name in record_fields(kind)})
    if issubclass(kind, StrEnum):
        return st.sampled_from(list(kind))
    integers, floats = st.integers(-1 << 64, 1 << 64), st.floats(allow_nan=False, allow_infinity=False)
    simple = {bool: st.booleans(), int: integers, float: floats}
    return simple.get(kind, st.text(max_size=4))


@settings(max_examples=60, deadline=None)
@given(made_of(Snapshot))
def test_every_snapshot_comes_back_as_it_was(snapshot: Snapshot) -> None:
    assert from_json(to_json(snapshot)) == snapshot
    assert loads(dumps(snapshot)) == snapshot


def test_a_line_is_ascii_without_line_breaks() -> None:
    line = dumps(rich_snapshot())
    assert line.isascii()
    assert line.isprintable()
    assert loads(line) == rich_snapshot()


def test_names_that_are_no_utf8_come_back() -> None:
    snapshot = replace(rich_snapshot(), collectors=(CollectorHealth("n\udcff\u2028vml", 0.1),))
    assert loads(dumps(snapshot)) == snapshot


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_written_as_unknown(odd: float) -> None:
    snapshot = rich_snapshot()
    reading = replace(snapshot.devices[0], power_watts=odd)
    document = json.loads(dumps(replace(snapshot, devices=(reading,))))
    assert document["devices"][0]["power_watts"] is None


def test_what_a_newer_agent_adds_is_ignored_and_what_an_older_lacks_takes_its_default() -> None:
    document = to_json(rich_snapshot())
    document["invented_later"] = {"x": 1}
    document["devices"][0]["invented_later"] = 1
    del document["enforcing"], document["devices"][0]["xid_last_seen_wall_ns"]
    read = from_json(document)
    assert read.enforcing is False
    assert read.devices[0].xid_last_seen_wall_ns == {}
    assert read.containers == rich_snapshot().containers


def broken(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    document = json.loads(dumps(rich_snapshot()))
    change(document)
    return dict(document)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(version=VERSION + 1), "version"),
        (lambda d: d.pop("version"), "version"),
        (lambda d: d.pop("at_ns"), "at_ns missing"),
        (lambda d: d.update(at_ns="soon"), r"snapshot\.at_ns: expected int"),
        (lambda d: d.update(at_ns=True), r"snapshot\.at_ns: expected int"),
        (lambda d: d.update(devices={}), r"snapshot\.devices: expected list"),
        (lambda d: d["devices"][0].update(xid_counts={"many": 1}), "xid_counts"),
        (lambda d: d["containers"][0]["usage"][0].update(sm_provenance="guessed"), "sm_provenance"),
        (lambda d: d["containers"][0]["usage"][0].update(sm_ratio=[]), r"usage\[0\]\.sm_ratio: expected a number"),
    ],
)
def test_a_wrong_document_is_refused_with_the_place(change: Callable[[dict[str, Any]], object], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        from_json(broken(change))


def test_the_committed_reference_is_the_generated_one() -> None:
    assert (Path(__file__).parents[4] / "docs/snapshot.md").read_text() == snapshot_reference.reference()


@pytest.mark.parametrize(
    ("name", "figure"),
    [
        ("wall_ns", "1" + "0" * 30),
        ("wall_ns", "-" + "9" * 400),
        ("at_ns", "NaN"),
        *(("power_watts", figure) for figure in ("NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400)),
    ],
)
def test_a_recording_with_a_figure_that_nothing_can_be_drawn_of_names_its_line(
    tmp_path: Path, name: str, figure: str
) -> None:
    line, recording = dumps(rich_snapshot()), tmp_path / "gpu.jsonl"
    recording.write_text(f"{line}\n" + re.sub(rf'"{name}":[^,]+', f'"{name}":{figure}', line, count=1))
    with opened(recording) as ticks, pytest.raises(SetupError, match=rf"gpu\.jsonl, line 2: snapshot\..*{name}: "):
        ticks[1]


def test_the_last_date_that_is_read_can_be_written() -> None:
    for wall_ns in (1 << 64, -1 << 64):
        assert datetime.fromtimestamp(loads(dumps(replace(rich_snapshot(), wall_ns=wall_ns))).wall_ns / 1e9).year > 1


@pytest.mark.parametrize("line", ["", "{", "null", "[]", "{}", '"x"', b"\xff", "[" * 100_000])
def test_what_is_no_snapshot_is_refused(line: str | bytes) -> None:
    with pytest.raises(SchemaError):
        loads(line)
