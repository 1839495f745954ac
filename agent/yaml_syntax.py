# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What PyYAML says when it cannot read a text, in words that name the cure.

Only the first syntax error can be reported, since nothing after it can be trusted; tabs are the exception: each line
that is indented with one is named.
"""

from __future__ import annotations

import re
from itertools import islice

import yaml
from yaml.reader import ReaderError

_TABBED = re.compile(r"^[^\S\n\t]*\t", re.MULTILINE)
MOST_TABS = 100  # a file that is full of them is told so often enough
# PyYAML's wording (a part of it) → what to write. The first that fits; the wording has not changed since PyYAML 3.
_CURES = (
    ("undefined alias", 'a pattern that begins with * must be in quotes, such as "*-batch"'),
    ("while scanning an alias", 'a pattern that begins with * must be in quotes, such as "*-batch"'),
    ("while scanning an anchor", "a value that begins with & must be in quotes"),
    ("mapping values are not allowed", "check the indentation, and put a value that contains ': ' in quotes"),
    ("could not find expected ':'", "write KEY: VALUE, with a space after the colon"),
    ("expected <block end>", "begin all keys of one block in the same column"),
    ("block sequence entries are not allowed", "put the list on its own lines, each beginning with '- '"),
    ("but got '?'", 'a pattern with a ? must be in quotes, such as "chat-?"'),
    ("expected ',' or '}'", "close the { with a }, and separate the entries with commas"),
    ("expected ',' or ']'", "close the [ with a ], and separate the entries with commas"),
    ("'<stream end>'", "close the [ or { that is still open"),
    ("while scanning a quoted scalar", "close the quotes, or use single quotes round backslashes"),
    ("while scanning a double-quoted scalar", "use single quotes round backslashes"),
    ("while scanning for the next token", "put the value in quotes"),
    ("expected a single document", "write one document a file, with one --- at most"),
    ("too many values", "write fewer"),
    ("nested too deeply", "close the brackets"),
    ("beyond all bounds", "write characters themselves, not their numbers, and leave out a %YAML line"),
    ("duplicate anchor", "give each anchor a name of its own"),
)


def explain(text: str, error: yaml.YAMLError) -> list[tuple[int, str]]:
    """(index into `text`, message) pairs for an error that PyYAML raised on it."""
    if isinstance(error, ReaderError):
        return [(error.position, f"the character U+{int(error.character):04X} is not allowed in YAML; remove it")]
    if not isinstance(error, yaml.MarkedYAMLError):
        return [(0, f"is not YAML ({error}); correct the syntax")]
    mark = error.problem_mark or error.context_mark
    index = mark.index if mark is not None else 0
    if text[index : index + 1] == "\t" or "\\t" in str(error.problem):
        return _tabs(text) or [(index, "a tab stands where YAML wants spaces; use spaces")]
    said = " ".join(" ".join(part.split()) for part in (error.context, error.problem) if part)
    cure = next((cure for sign, cure in _CURES if sign in said), "correct the syntax")
    return [(index, f"is not YAML ({said}); {cure}")]


def _tabs(text: str) -> list[tuple[int, str]]:
    tabs = (found.end() - 1 for found in _TABBED.finditer(text))
    return [(index, "the line is indented with a tab; use spaces") for index in islice(tabs, MOST_TABS)]
