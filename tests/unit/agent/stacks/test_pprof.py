# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""Stacks as a pprof profile: the published fields, valid references, and every launch or byte in it."""

from __future__ import annotations

import gzip
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.protobuf import message_classes
from agent.core.text import printable
from agent.stacks.output import MESSAGES, PACKAGE, StackReport, profile

# The fields of proto/profile.proto, github.com/google/pprof at b9395ee17fa0, without comments. Apache-2.0, Google Inc.
PUBLISHED = """
syntax = "proto3"; package perftools.profiles;
message Profile {
  repeated ValueType sample_type = 1; repeated Sample sample = 2; repeated Mapping mapping = 3;
  repeated Location location = 4; repeated Function function = 5; repeated string string_table = 6;
  int64 drop_frames = 7; int64 keep_frames = 8; int64 time_nanos = 9; int64 duration_nanos = 10;
  ValueType period_type = 11; int64 period = 12; repeated int64 comment = 13; int64 default_sample_type = 14;
  int64 doc_url = 15;
}
message ValueType { int64 type = 1; int64 unit = 2; }
message Sample { repeated uint64 location_id = 1; repeated int64 value = 2; repeated Label label = 3; }
message Label { int64 key = 1; int64 str = 2; int64 num = 3; int64 num_unit = 4; }
message Mapping {
  uint64 id = 1; uint64 memory_start = 2; uint64 memory_limit = 3; uint64 file_offset = 4; int64 filename = 5;
  int64 build_id = 6; bool has_functions = 7; bool has_filenames = 8; bool has_line_numbers = 9;
  bool has_inline_frames = 10;
}
message Location {
  uint64 id = 1; uint64 mapping_id = 2; uint64 address = 3; repeated Line line = 4; bool is_folded = 5;
}
message Line { uint64 function_id = 1; int64 line = 2; int64 column = 3; }
message Function { uint64 id = 1; int64 name = 2; int64 system_name = 3; int64 filename = 4; int64 start_line = 5; }
"""
MESSAGE = re.compile(r"message (\w+) \{(.*?)\}", re.DOTALL)
FIELD = re.compile(r"(repeated )?(\w+) (\w+) = (\d+);")
DEFINITION = {
    name: tuple((int(number), field, ("*" if repeated else "") + kind) for repeated, kind, field, number in fields)
    for name, fields in ((name, FIELD.findall(body)) for name, body in MESSAGE.findall(PUBLISHED))
}
PUBLISHED_CLASSES = message_classes(PACKAGE, DEFINITION)

stacks = st.dictionaries(
    st.lists(st.text(max_size=8), min_size=1, max_size=5).map(tuple), st.integers(1, 1 << 40), max_size=12
)


def report(values: dict[tuple[str, ...], int], kind: str = "launch", **tallies: int) -> StackReport:
    return StackReport("chat", kind, 10.5, values, tallies, 1_700_000_000_000_000_000)


def decoded(written: StackReport) -> Any:
    """As a reader with the whole published definition sees the file."""
    return PUBLISHED_CLASSES["Profile"].FromString(gzip.decompress(profile(written)))


def stacks_of(read: Any) -> list[tuple[tuple[str, ...], int]]:
    """Names, outermost first, and value of each sample, by following all references."""
    names = {function.id: read.string_table[function.name] for function in read.function}
    locations = {location.id: names[location.line[0].function_id] for location in read.location}
    return [
        (tuple(locations[number] for number in reversed(sample.location_id)), sample.value[0]) for sample in read.sample
    ]


@pytest.mark.parametrize("name", sorted(MESSAGES))
def test_each_field_is_that_of_the_published_definition(name: str) -> None:
    assert set(MESSAGES[name]) <= set(DEFINITION[name])


@given(stacks)
def test_the_values_add_up_to_the_total(values: dict[tuple[str, ...], int]) -> None:
    read = decoded(report(values))
    assert sum(sample.value[0] for sample in read.sample) == sum(values.values())


@given(stacks)
def test_each_stack_comes_back_with_its_frames_and_its_value(values: dict[tuple[str, ...], int]) -> None:
    expected = [(tuple(map(printable, frames)), value) for frames, value in values.items()]
    assert stacks_of(decoded(report(values))) == expected


@given(stacks)
def test_ids_are_unique_and_not_zero_and_references_are_valid(values: dict[tuple[str, ...], int]) -> None:
    read = decoded(report(values))
    assert read.string_table[0] == ""
    assert len(set(read.string_table)) == len(read.string_table)
    ids = [[entry.id for entry in entries] for entries in (read.mapping, read.location, read.function)]
    assert all(0 not in numbers and len(set(numbers)) == len(numbers) for numbers in ids)
    mappings, locations, functions = map(set, ids)
    assert {location.mapping_id for location in read.location} <= mappings
    assert {line.function_id for location in read.location for line in location.line} <= functions
    for sample in read.sample:
        assert set(sample.location_id) <= locations
        assert len(sample.value) == len(read.sample_type) == 1


@pytest.mark.parametrize(
    ("kind", "type_", "unit"), [("launch", "launches", "count"), ("alloc", "inuse_space", "bytes")]
)
def test_the_sample_type_names_what_is_counted_and_its_unit(kind: str, type_: str, unit: str) -> None:
    read = decoded(report({("a",): 1}, kind))
    [sample_type] = read.sample_type
    assert (read.string_table[sample_type.type], read.string_table[sample_type.unit]) == (type_, unit)


def test_headline_and_notes_are_comments() -> None:
    written = report({("a",): 7}, "alloc", seen=9, sampled=7, collision=2)
    read = decoded(written)
    assert [read.string_table[index] for index in read.comment] == [written.headline, *written.notes()]


def test_functions_are_known_so_no_reader_looks_for_the_binary() -> None:
    read = decoded(report({("a", "b"): 1}))
    [mapping] = read.mapping
    assert mapping.has_functions
    assert read.string_table[mapping.filename] == "chat"


def test_the_time_and_the_duration_are_in_nanoseconds() -> None:
    read = decoded(report({("a",): 1}))
    assert (read.time_nanos, read.duration_nanos) == (1_700_000_000_000_000_000, 10_500_000_000)
    assert decoded(StackReport("chat", "launch", 1.0, {})).time_nanos == 0


def test_a_function_is_written_once_however_many_stacks_have_it() -> None:
    read = decoded(report({("main", "a"): 1, ("main", "b"): 2, ("main", "a", "main"): 3}))
    assert len(read.function) == len(read.location) == 3


def test_the_same_report_gives_the_same_bytes() -> None:
    values: dict[tuple[str, ...], int] = {("main", "a"): 1, ("main", "b"): 2}
    assert profile(report(values)) == profile(report(values))
