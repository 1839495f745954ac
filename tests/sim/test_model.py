# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The model's promises, each a C function in model_test.c that drives it with times of its own choosing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_SIM = _HERE.parents[1] / "sim"
_NAMES = re.findall(r"^\s*TEST\((\w+)\)", (_HERE / "model_test.c").read_text(), re.MULTILINE)


@pytest.fixture(scope="session")
def model_test(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests and the model in one program, with the compiler's checks for stray memory and overflow."""
    program = tmp_path_factory.mktemp("model") / "model_test"
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", "-fsanitize=address,undefined"]
    sources = [str(_HERE / "model_test.c"), *(str(_SIM / "server" / name) for name in ("copies.c", "model.c", "sms.c"))]
    subprocess.run(["gcc", *flags, f"-I{_SIM}", f"-I{_SIM / 'include'}", *sources, "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("name", _NAMES)
def test_of_the_model(model_test: Path, name: str) -> None:
    done = subprocess.run([model_test, name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_test_of_the_model_is_known_to_pytest(model_test: Path) -> None:
    listed = subprocess.run([model_test], capture_output=True, text=True, timeout=60, check=True)
    assert listed.stdout.split() == _NAMES
