# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What the bundle has to bring: every package that is imported, each library after those that it needs."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from conformance import bundle
from tools.shipping.closure import closure, requirements

ROOT = Path(__file__).parents[3]
OURS = {"agent", "enforce", "gpuwarden", "bench", "conformance", "tools", "sim"}
OF_THE_MACHINE = {"cuda", "cupy", "jax", "numpy", "torch", "triton"}  # where they are not, items skip what needs them
ONLY_IN_THE_CHECKOUT = {"bundle.py"}  # which makes the bundle


def imported(path: Path) -> Iterator[str]:
    """Packages that the file imports, wherever in it; not those for types alone."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


@pytest.mark.parametrize("folder", ["agent", "enforce", "gpuwarden", "conformance"])
def test_every_package_that_is_imported_is_brought(folder: str) -> None:
    files = [path for path in sorted((ROOT / folder).rglob("*.py")) if path.name not in ONLY_IN_THE_CHECKOUT]
    names = {name for path in files for name in imported(path)}
    beside = {path.stem for path in (ROOT / "conformance/programs").glob("*.py")}  # programs find what lies beside them
    third = names - OURS - OF_THE_MACHINE - beside - sys.stdlib_module_names - {"_typeshed"}
    distributions, there = packages_distributions(), set(closure(requirements()))
    missing = {name for name in third if not {canonicalize_name(d) for d in distributions.get(name, [])} & there}
    assert not missing


def test_frameworks_programs_import_nothing_of_ours() -> None:
    """Their interpreter has no package of the bundle."""
    for path in sorted((ROOT / "conformance/programs").glob("*.py")):
        assert not set(imported(path)) & OURS, path


def test_run_is_a_script_that_bash_understands() -> None:
    run = ROOT / "conformance/run"
    subprocess.run(["bash", "-n", run], check=True)
    assert run.stat().st_mode & 0o111


def test_libraries_are_listed_with_what_they_need_before_them(tmp_path: Path) -> None:
    order = bundle.copy_libraries(tmp_path / "lib")
    assert order[-1] == bundle.LIBRARY
    assert order.index("libz.so.1") < order.index("libelf.so.1")
    assert sorted(path.name for path in (tmp_path / "lib").iterdir()) == sorted([*order, "ORDER"])
    assert not any(name.startswith(("libc.", "ld-")) for name in order)


def test_the_oldest_glibc_that_does_is_read_from_the_files(tmp_path: Path) -> None:
    bundle.copy_libraries(tmp_path / "lib")
    major, minor = map(int, bundle.newest_glibc(tmp_path).split(".")[:2])
    assert major == 2
    assert minor >= 14  # memcpy's


def test_a_folder_without_programs_asks_for_nothing(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no program")
    assert bundle.newest_glibc(tmp_path) == "0"


def test_the_product_in_the_bundle_knows_its_version(tmp_path: Path) -> None:
    bundle.copy_sources(tmp_path)
    script = "from importlib.metadata import version; print(version('gpuwarden'))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {script}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() in (ROOT / "pyproject.toml").read_text()
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["agent"]
    files = [path.relative_to(ROOT) for pattern in data for path in (ROOT / "agent").glob(pattern)]
    assert len(files) >= 2
    assert not [path for path in files if not (tmp_path / path).is_file()]
    assert not (tmp_path / "bench/results").exists()
