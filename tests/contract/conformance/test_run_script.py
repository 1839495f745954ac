# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The bundle's `run`, on a bundle that holds next to nothing: what it brings, to whom, and that nothing stays."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.harness.wait import until

RUN = Path(__file__).parents[3] / "conformance" / "run"
OURS = f"{sys.version_info.major}.{sys.version_info.minor}"
TELLS = """\
import json, os, signal, subprocess, sys, time
import brought
signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.argv[1:] == ["wait"]:
    print("waiting", flush=True)
    time.sleep(600)
inherited = "import os; print([name for name in os.environ if name.startswith('PYTHON') and name != 'PYTHON'])"
inherited = subprocess.run([os.environ["GPUWARDEN_GPU_PYTHON"], "-c", inherited], stdout=subprocess.PIPE, text=True)
theirs = subprocess.run([os.environ["GPUWARDEN_GPU_PYTHON"], "-c", "import brought"], stderr=subprocess.PIPE, text=True)
aside = [sys.executable, "-I", "-c", "import brought, conformance; print(brought.WORD)"]
aside = subprocess.run(aside, stdout=subprocess.PIPE, text=True).stdout.strip()
said = {"arguments": sys.argv[1:], "brought": brought.WORD, "theirs": theirs.stderr.splitlines()[-1:], "aside": aside}
said["inherited"] = inherited.stdout.strip()
print(json.dumps(said))
sys.exit(7)
"""


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    made = tmp_path / "a bundle"
    for folder in ("conformance", "wheels", "lib"):
        (made / folder).mkdir(parents=True)
    shutil.copy2(RUN, made / "run")
    (made / "PYTHON").write_text(f"{OURS}\n")
    (made / "lib/ORDER").write_text("")
    (made / "conformance/__init__.py").write_text("")
    (made / "conformance/__main__.py").write_text(TELLS)
    with zipfile.ZipFile(made / "wheels/brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "WORD = 'from a wheel'\n")
    return made


def environment(tmp_path: Path, **more: str) -> Mapping[str, str]:
    """Next to none, and a folder for what is temporary."""
    (tmp_path / "temporary").mkdir(exist_ok=True)
    return {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, "TMPDIR": str(tmp_path / "temporary"), **more}


def run(bundle: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    given = environment(bundle.parent, **more)
    return subprocess.run(
        [bundle / "run", *arguments], env=given, cwd="/", capture_output=True, text=True, check=False, timeout=60
    )


def test_packages_are_brought_and_arguments_and_status_passed_on(bundle: Path) -> None:
    done = run(bundle, "--out", "a folder")
    assert done.returncode == 7, done.stderr
    assert '"arguments": ["--out", "a folder"], "brought": "from a wheel"' in done.stdout
    assert not list((bundle.parent / "temporary").iterdir())


def test_programs_that_take_no_path_from_the_environment_find_what_is_brought(bundle: Path) -> None:
    """As the agent starts its guardian."""
    assert '"aside": "from a wheel"' in run(bundle).stdout


def test_the_frameworks_python_sees_none_of_what_is_brought(bundle: Path) -> None:
    assert '"theirs": ["ModuleNotFoundError: No module named \'brought\'"]' in run(bundle).stdout
    own = {"GPUWARDEN_GPU_PYTHON": "/usr/bin/python3"}
    assert '"theirs": ["ModuleNotFoundError: No module named \'brought\'"]' in run(bundle, **own).stdout


def test_the_frameworks_python_gets_no_setting_of_ours_and_keeps_its_own(bundle: Path) -> None:
    assert '"inherited": "[]"' in run(bundle).stdout
    assert '"inherited": "[\'PYTHONDONTWRITEBYTECODE\']"' in run(bundle, PYTHONDONTWRITEBYTECODE="1").stdout


def test_nothing_is_written_into_the_bundle(bundle: Path) -> None:
    before = sorted(bundle.rglob("*"))
    run(bundle)
    assert sorted(bundle.rglob("*")) == before


def test_the_frameworks_python_keeps_its_own_path(bundle: Path) -> None:
    (bundle.parent / "theirs").mkdir()
    (bundle.parent / "theirs/brought.py").write_text("raise RuntimeError('theirs, not ours')\n")
    assert (
        '"theirs": ["RuntimeError: theirs, not ours"]' in run(bundle, PYTHONPATH=str(bundle.parent / "theirs")).stdout
    )


@pytest.mark.parametrize(
    ("wanted", "python", "message"),
    [
        ("9.9", sys.executable, f"this bundle is for Python 9.9, and {sys.executable} is {OURS}: set PYTHON"),
        (OURS, "no-such-python", f"no no-such-python here: set PYTHON to a Python {OURS}"),
    ],
)
def test_another_python_is_refused(bundle: Path, wanted: str, python: str, message: str) -> None:
    (bundle / "PYTHON").write_text(f"{wanted}\n")
    done = run(bundle, PYTHON=python)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_ends_it_and_nothing_stays(bundle: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        # A shell cannot undo that a signal is ignored, as SIGINT is in what another one starts in the background.
        ["env", "--default-signal=HUP,INT", bundle / "run", "wait"],
        env=environment(bundle.parent),
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "waiting\n"
        os.kill(process.pid, number)
        assert process.wait(30) == 128 + number
    temporary = bundle.parent / "temporary"
    until(lambda: not list(temporary.iterdir()), lambda: f"an empty folder, not {list(temporary.iterdir())}")
