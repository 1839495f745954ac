# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""YAML as plain values with the position of each, and its syntax errors with what to write instead.

Owns what PyYAML accepts or gets wrong for us: duplicate keys (it silently keeps the last), `off` as a boolean, 1:30 as
the number 90, tags, alias bombs, endless nesting, line ends that no editor shows. The work is bounded by MAX_NODES and
MAX_DEPTH, whatever the text is.
Plain scalars follow YAML 1.2's core schema: only true and false are booleans. Only the first syntax error can be
reported, since nothing after it can be trusted; tabs are the exception: each line that is indented with one is named.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import islice

import yaml
from yaml.reader import ReaderError

_TABBED = re.compile(r"^[^\S\n\t]*\t", re.MULTILINE)
MOST_TABS = 100  # reported in one file
_HIDING = re.compile("\r(?!\n)|[\x85\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_LINE_ENDS = "\r\x85\u2028\u2029"
# A part of PyYAML's message → what to write. The first match counts; the wording has not changed since PyYAML 3.
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
        return _tabs(text) or [(index, "a tab is where YAML needs spaces; use spaces")]
    message = " ".join(" ".join(part.split()) for part in (error.context, error.problem) if part)
    cure = next((cure for sign, cure in _CURES if sign in message), "correct the syntax")
    return [(index, f"is not YAML ({message}); {cure}")]


def _tabs(text: str) -> list[tuple[int, str]]:
    tabs = (found.end() - 1 for found in _TABBED.finditer(text))
    return [(index, "the line is indented with a tab; use spaces") for index in islice(tabs, MOST_TABS)]


def _hidden(text: str) -> list[tuple[int, str]]:
    """Characters by which a file says something else to YAML than to its reader: a rule behind a comment's end."""
    found = islice(_HIDING.finditer(text), MOST_TABS)
    return [(one.start(), f"the character U+{ord(one[0]):04X} {_hides(one[0])}; remove it") for one in found]


def _hides(character: str) -> str:
    if character in _LINE_ENDS:
        return "ends a line, and a comment, for YAML but in no editor"
    return "changes the order in which an editor shows what follows"


MAX_NODES = 20_000
MAX_DEPTH = 32
KeyPath = tuple[str | int, ...]
_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_FLOAT_SPECIAL = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_WORDS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_WORDS_NULL = {"", "~", "null", "Null", "NULL"}


@dataclass(frozen=True, slots=True, order=True)
class YamlPosition:
    """A position in the text: line and column from 1, and the number of characters from there."""

    line: int = 1
    column: int = 1
    width: int = 1


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One mistake: its position, and `what is wrong; what to write instead`."""

    place: YamlPosition
    text: str


@dataclass(slots=True)
class Source:
    """The values of a text. `places`: the position of each value; `keys`: that of each key of a mapping.

    `problems`: what is invalid YAML; `broken`: the paths of values that were dropped for it.
    """

    data: object = None
    places: dict[KeyPath, YamlPosition] = field(default_factory=dict)
    keys: dict[KeyPath, YamlPosition] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    broken: set[KeyPath] = field(default_factory=set)

    def place(self, path: KeyPath) -> YamlPosition:
        """The position of the value at a path, or of the nearest one above it."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, YamlPosition())

    def key_place(self, path: KeyPath) -> YamlPosition:
        """The position of the key that a path ends with; where there is none, as `place`."""
        return self.keys.get(path) or self.place(path)


def read(text: str) -> Source:
    """Reads a text. Never raises: what is invalid is in `problems`. An empty text has neither data nor problems."""
    source = Source()
    starts = [0] + [found.end() for found in re.finditer("\n", text)]
    if hidden := _hidden(text):
        source.problems += [Problem(_place(starts, index), message) for index, message in hidden]
        return source
    try:
        root = _Loader(text).get_single_node()
    except yaml.YAMLError as error:
        source.problems += [Problem(_place(starts, index), message) for index, message in explain(text, error)]
        return source
    if root is None:
        return source
    source.data = _Reader(source, starts).value(root, ())
    return source


class _Loader(yaml.SafeLoader):
    """Composes nodes only, within bounds; no value is ever constructed by PyYAML."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._nodes = 0
        self._depth = 0

    def get_single_node(self) -> yaml.Node | None:
        """The root node. Numbers that are no character or version to Python are an error like any other."""
        try:
            node: yaml.Node | None = super().get_single_node()
        except (ValueError, OverflowError, RecursionError) as error:
            raise yaml.MarkedYAMLError(problem="beyond all bounds", problem_mark=self.get_mark()) from error
        return node

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._nodes += 1
        self._depth += 1
        if self._nodes > MAX_NODES:
            raise yaml.MarkedYAMLError(problem="too many values", problem_mark=self.get_mark())
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=self.get_mark())
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _Reader:
    """Nodes to values. An aliased node is read once per use, and every use counts against MAX_NODES."""

    def __init__(self, source: Source, starts: list[int]) -> None:
        self._source = source
        self._starts = starts
        self._left = MAX_NODES
        self._open: set[int] = set()

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        self._source.places.setdefault(path, self._place(node))
        if id(node) in self._open:
            return self._lost(node, path, "an alias contains itself; write the values out")
        self._left -= 1
        if self._left == 0:
            return self._lost(node, path, "the aliases expand to too many values; write fewer")
        if self._left < 0:
            self._source.broken.add(path)
            return None
        self._open.add(id(node))
        try:
            return self._inside(node, path)
        finally:
            self._open.discard(id(node))

    def _inside(self, node: yaml.Node, path: KeyPath) -> object:
        if node.tag not in _TAGS:
            return self._lost(node, path, f"the tag {node.tag[:60]!r} means nothing here; leave it out")
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return _scalar(node)

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        values: dict[str, object] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) and key_node.tag in _TAGS else None
            if not isinstance(key, str):
                self._problem(key_node, "a key must be a plain word; write it without brackets or tags")
            elif key == "<<":
                self._problem(key_node, "merge keys (<<) are not read; write the keys out")
            elif key in values:
                first = self._source.keys[(*path, key)].line
                self._problem(key_node, f"the key {key[:60]!r} is here twice (first on line {first}); keep one of them")
            else:
                here, there = self._place(key_node), self._place(value_node)
                plain = isinstance(value_node, yaml.ScalarNode) and there.width > 0 and there.line == here.line
                self._source.keys[(*path, key)] = here
                self._source.places[(*path, key)] = there if plain else here
                values[key] = self.value(value_node, (*path, key))
        return values

    def _place(self, node: yaml.Node) -> YamlPosition:
        """The position of a scalar, as far as its first line goes; of a collection, where it begins."""
        start, end = node.start_mark.index, node.end_mark.index
        return _place(self._starts, start, end - start if isinstance(node, yaml.ScalarNode) else 1)

    def _lost(self, node: yaml.Node, path: KeyPath, text: str) -> object:
        self._problem(node, text)
        self._source.broken.add(path)
        return None

    def _problem(self, node: yaml.Node, text: str) -> None:
        self._source.problems.append(Problem(self._place(node), text))


def _place(starts: list[int], index: int, width: int = 1) -> YamlPosition:
    line = bisect_right(starts, index)
    left = starts[line] - 1 - index if line < len(starts) else width
    return YamlPosition(line, index - starts[line - 1] + 1, max(0, min(width, left)))


def _scalar(node: yaml.Node) -> object:
    text: str = node.value
    if getattr(node, "style", None) is not None:  # quoted or block: always text
        return text
    if text in _WORDS:
        return _WORDS[text]
    if text in _WORDS_NULL:
        return None
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _FLOAT_SPECIAL.fullmatch(text):
        return float(text.replace(".", ""))
    return text
