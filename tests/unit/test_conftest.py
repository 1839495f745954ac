# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""What tests/conftest.py does for all tests, tried on a tree of tests of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SECOND_TRIES

CONFTEST = Path(__file__).parents[1] / "conftest.py"
PROPERTIES = """
from hypothesis import given, settings, strategies as st

tried = {"default": 0, "own": 0}

@given(st.integers())
def test_default(number):
    tried["default"] += 1

@given(st.integers())
@settings(max_examples=20)
def test_own(number):
    tried["own"] += 1

def test_count():
    print("tried", tried["default"], tried["own"])
"""
FAILING = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_it(number):
    assert number < 1000
"""


FIRST_FAILS = """
tries = []

def test_it():
    tries.append(1)
    assert len(tries) == 2, "the first try"
"""
ONE = "tests/sim/test_checkpoint.py"


def run(folder: Path, test: str, *arguments: str, ci: bool, file: str = ONE) -> subprocess.CompletedProcess[str]:
    """pytest over a tree with this one test file."""
    path = folder / file
    path.parent.mkdir(parents=True)
    path.write_text(test)
    (folder / "tests" / "conftest.py").write_text(CONFTEST.read_text())
    (folder / "pytest.ini").write_text(
        f"[pytest]\nmarkers =\n    {path.relative_to(folder).parts[1]}\ntestpaths = tests\n"
    )
    environment = {name: value for name, value in os.environ.items() if name not in ("CI", "PYTEST_ADDOPTS")}
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider", *arguments]
    environment |= {"CI": "true"} if ci else {}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    "test",
    [
        "import pytest\ndef test_it(): pytest.skip('no moon')",
        "import pytest\n@pytest.mark.skip(reason='no moon')\ndef test_it(): pass",
        "import pytest\npytestmark = pytest.mark.skipif(True, reason='no moon')\ndef test_it(): pass",
    ],
)
@pytest.mark.parametrize("ci", [True, False])
def test_a_skip_that_is_not_known_fails_the_run_in_ci_only(tmp_path: Path, test: str, ci: bool) -> None:
    done = run(tmp_path, test, ci=ci)
    assert done.returncode == int(ci), done.stdout
    assert (f"{ONE}::test_it: Skipped: no moon" in done.stdout) == ci


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    done = run(tmp_path, "import pytest\n@pytest.mark.xfail\ndef test_it(): assert False", ci=True)
    assert done.returncode == 0, done.stdout


NAMED = next(iter(SECOND_TRIES))


@pytest.mark.parametrize(("ci", "file", "passes"), [(True, NAMED, True), (True, ONE, False), (False, NAMED, False)])
def test_only_what_is_named_has_a_second_try_and_only_in_ci(tmp_path: Path, ci: bool, file: str, passes: bool) -> None:
    done = run(tmp_path, FIRST_FAILS, ci=ci, file=file)
    assert (done.returncode == 0) == passes, done.stdout
    assert ("test_it (call)" in done.stdout) == passes
    assert "the first try" in done.stdout


@pytest.mark.parametrize("file", SECOND_TRIES)
def test_a_file_with_a_second_try_exists_and_there_are_few(file: str) -> None:
    assert (CONFTEST.parents[1] / file).is_file()
    assert len(SECOND_TRIES) <= 5


def test_what_fails_twice_fails_the_run(tmp_path: Path) -> None:
    assert run(tmp_path, "def test_it(): assert False", ci=True, file=NAMED).returncode == 1


@pytest.mark.parametrize(("arguments", "counts"), [((), "tried 100 20"), (("--long",), "tried 1000 200")])
def test_long_tries_ten_times_as_many_examples(tmp_path: Path, arguments: tuple[str, ...], counts: str) -> None:
    assert counts in run(tmp_path, PROPERTIES, *arguments, ci=True).stdout


def test_what_fails_prints_how_to_reproduce_it(tmp_path: Path) -> None:
    assert "@reproduce_failure(" in run(tmp_path, FAILING, "--long", ci=True).stdout


def test_a_test_in_no_tier_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_lost.py").write_text("def test_it(): pass")
    assert "is in no tier" in run(tmp_path, "def test_it(): pass", ci=False).stderr
