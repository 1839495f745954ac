# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What import-linter cannot say: modules that use nothing but the standard library, or nothing that does I/O."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = ("agent", "enforce", "gpuwarden")
VOCABULARY = [path for name in OURS for path in sorted((ROOT / name).rglob("model.py"))]
SPDX = ("SPDX-License-Identifier: ", "SPDX-FileCopyrightText: The GPU Warden authors")
SOURCES = [
    path
    for folder in (
        *("agent", "enforce", "gpuwarden", "bpf", "sim", "bench", "conformance"),
        *("dashboards", "tools", "tests", "packaging"),
    )
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c", ".h", ".sh", ".js", ".css") and "build" not in path.relative_to(ROOT).parts
]


def imports_of(path: Path) -> Iterator[str]:
    """Names of every module that the file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def test_the_vocabulary_of_observing_exists() -> None:
    assert ROOT / "agent" / "core" / "model.py" in VOCABULARY


def reachable(path: Path, seen: set[Path]) -> set[Path]:
    """The file, and every file of ours that importing it loads."""
    if path not in seen:
        seen.add(path)
        for name in imports_of(path):
            if name.split(".")[0] in OURS:
                module = ROOT.joinpath(*name.split("."))
                reachable(module / "__init__.py" if module.is_dir() else module.with_suffix(".py"), seen)
    return seen


@pytest.mark.parametrize("path", VOCABULARY, ids=lambda path: str(path.relative_to(ROOT)))
def test_vocabulary_imports_the_standard_library_only(path: Path) -> None:
    allowed = {*sys.stdlib_module_names, *OURS}
    imported = {(file.name, name) for file in reachable(path, set()) for name in imports_of(file)}
    assert {(file, name) for file, name in imported if name.split(".")[0] not in allowed} == set()


def test_every_source_file_begins_with_its_licence() -> None:
    def head(path: Path) -> str:
        with path.open() as stream:
            return stream.read(400)

    unlicensed = [str(path.relative_to(ROOT)) for path in SOURCES if not all(line in head(path) for line in SPDX)]
    assert not unlicensed


def test_make_help_explains_every_target() -> None:
    lines = (ROOT / "Makefile").read_text().split("\n")
    phony = next(line for line in lines if line.startswith(".PHONY:")).split()[1:]
    explained = {line.split(":")[0] for line in lines if " ## " in line}
    assert {target for target in phony if not target.startswith("packages")} == explained


def test_nothing_but_tests_imports_tests() -> None:
    importing = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.suffix == ".py" and not path.is_relative_to(ROOT / "tests")
        if any(name.split(".")[0] == "tests" for name in imports_of(path))
    ]
    assert not importing


def test_the_agent_imports_nothing_that_only_a_command_or_a_few_nodes_need() -> None:
    """pydantic and textual take 12 MiB each, protobuf and h2 8, and an agent runs on every node for weeks."""
    heavy = ("asyncio", "google.protobuf", "h2", "numpy", "pydantic", "rich.console", "textual", "unittest")
    code = f"import sys, gpuwarden.run; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
