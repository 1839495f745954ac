# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The floor plan stays as it is: how many files and entries, how many arrows, no circle, nothing too large.

The numbers are in pyproject.toml, `[tool.gpuwarden.layout]`. Which room may import which is import-linter's contract.
"""

from __future__ import annotations

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, Final

import grimp
import pytest

ROOT: Final = Path(__file__).parents[2]
LIMITS: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["gpuwarden"]["layout"]
PACKAGES: Final[list[str]] = LIMITS["packages"]
FILES: Final = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
MOST_LINES, MOST_PARAMETERS, MOST_FIELDS = 40, 5, 12
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# What is larger, and why it reads better so. One that is not larger any more has to leave the list.
REASONS: Final[dict[str, str]] = {
    "agent/attribution/split.py:Work: fields": "one process on one device: grouping them would only rename them",
    "agent/core/model.py:DeviceReading: fields": "one reading of one device: grouping them would only rename them",
    "agent/core/model.py:EnforcementStatus: fields": "the keys of the snapshot's JSON, which clients read",
    "agent/core/model.py:Snapshot: fields": "the keys of the snapshot's JSON, which clients read",
    "agent/core/worker.py:Worker.__init__: parameters": "four of them are keyword-only and optional",
    "agent/exporters/status_page/content.py:page: parameters": "all that the page shows; its only caller is the route",
    "agent/exporters/web/schema.py:TlsSection: fields": "the keys of the exporter-toolkit's tls_server_config",
    "agent/observer.py:Observer: fields": "the parts that observing owns, made in the order of their needs",
    "agent/pipeline.py:Pipeline: fields": "the parts that a tick goes through, one each",
    "agent/tui/cells.py:graph: parameters": "a drawing: values, scale, size, glyphs, style",
    "agent/tui/container_page.py:container_page: parameters": "a drawing: what is shown, and for which terminal",
    "agent/tui/header.py:_gauges: parameters": "a drawing: what is shown, and for which terminal",
    "agent/tui/header.py:_block: parameters": "a drawing: what is shown, and for which terminal",
    "agent/tui/live/app.py:Top: fields": "textual's App holds what its widgets show",
    "enforce/actuators/mps/limits.py:changes: parameters": "pure: each limit's source, by name",
    "enforce/actuators/mps/restore.py:_change: parameters": "the fields of one ledger entry",
    "enforce/audit/decision_log.py:DecisionRecord: fields": "the keys of a line of the decision log",
    "enforce/audit/model.py:OfflineInterval: fields": "the keys of an interval in the JSON of explain",
    "enforce/audit/recorder.py:EffectRecord: fields": "the keys of a line of the decision log",
    "enforce/memory/controller.py:MemoryController._decision: parameters": "the fields of one line of the decision log",
    "enforce/policy/schema.py:SloSection: fields": "the keys of `slo` in a policy",
    "enforce/recovery/guardian.py:Guardian: fields": "the process: its maps, descriptors and clocks",
}


@dataclass(frozen=True, slots=True)
class Size:
    """A function's lines or parameters, or a class's fields."""

    name: str  # path:qualified name: what
    amount: int
    most: int


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, cache_dir=None)


def arrows(package: str) -> set[tuple[str, str]]:
    """Pairs of direct children of the package of which the first imports the second."""
    pairs = set()
    for module in graph().modules:
        for imported in graph().find_modules_directly_imported_by(module):
            if module.startswith(f"{package}.") and imported.startswith(f"{package}."):
                pairs.add((module.split(".")[1], imported.split(".")[1]))
    return {(one, other) for one, other in pairs if one != other}


def on_a_circle(edges: dict[str, set[str]]) -> list[str]:
    """Whatever can be reached from itself."""

    def reached(start: str) -> set[str]:
        seen, left = set[str](), list(edges[start])
        while left:
            if (node := left.pop()) not in seen:
                seen.add(node)
                left += edges.get(node, ())
        return seen

    return sorted(node for node in edges if node in reached(node))


def sizes(path: Path) -> Iterator[Size]:
    """Of every function and class in the file, nested ones too."""
    for owner, node in _definitions(ast.parse(path.read_text()), ""):
        name = f"{path.relative_to(ROOT)}:{owner}"
        if isinstance(node, ast.ClassDef):
            yield Size(f"{name}: fields", len(fields(node)), MOST_FIELDS)
        else:
            assert node.end_lineno is not None
            yield Size(f"{name}: lines", node.end_lineno - node.lineno + 1, MOST_LINES)
            yield Size(f"{name}: parameters", parameters(node), MOST_PARAMETERS)


def _definitions(
    tree: ast.AST, within: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            name = f"{within}{node.name}"
            yield name, node
            yield from _definitions(node, f"{name}.")
        else:
            yield from _definitions(node, within)


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Without self and cls."""
    names = [one.arg for one in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def fields(owner: ast.ClassDef) -> set[str]:
    """Annotated in the class, or assigned to self in any method."""
    found = {
        node.target.id
        for node in owner.body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
    }
    found |= {
        node.attr
        for made in owner.body
        for node in (ast.walk(made) if isinstance(made, _FUNCTIONS) else ())
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return found


def test_there_are_no_more_files_than_there_may_be() -> None:
    assert len(FILES) <= LIMITS["most_files"]


def test_the_median_file_is_no_fragment() -> None:
    assert median(path.read_text().count("\n") for path in FILES) >= LIMITS["least_median_lines"]


def test_no_folder_has_more_entries_than_there_may_be() -> None:
    folders = {path.parent for path in FILES}
    entries = {
        folder: [entry for entry in folder.iterdir() if entry.name not in ("__init__.py", "__pycache__")]
        for folder in folders
    }
    crowded = {str(folder.relative_to(ROOT)): len(found) for folder, found in entries.items()}
    assert not {folder: count for folder, count in crowded.items() if count > LIMITS["most_entries"]}


@pytest.mark.parametrize("package", LIMITS["most_arrows"])
def test_the_rooms_of_a_package_know_no_more_of_each_other_than_they_may(package: str) -> None:
    assert len(arrows(package)) <= LIMITS["most_arrows"][package]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_circle_leads_through_the_rooms_of_a_package(package: str) -> None:
    edges: dict[str, set[str]] = {}
    for one, other in arrows(package):
        edges.setdefault(one, set()).add(other)
    assert not on_a_circle(edges)


def test_no_circle_leads_through_modules() -> None:
    assert not on_a_circle({one: set(graph().find_modules_directly_imported_by(one)) for one in graph().modules})


def test_a_circle_is_found() -> None:
    assert on_a_circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c"]


def test_no_two_classes_have_one_name() -> None:
    nodes = (node for path in FILES for node in ast.walk(ast.parse(path.read_text())))
    defined = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not [name for name, count in defined.items() if count > 1]


def test_what_is_larger_than_it_may_be_has_a_reason() -> None:
    large = {size.name: size.amount for path in FILES for size in sizes(path) if size.amount > size.most}
    assert not {name: amount for name, amount in large.items() if name not in REASONS}
    assert not REASONS.keys() - large.keys(), "these are small enough now: take them off the list"
