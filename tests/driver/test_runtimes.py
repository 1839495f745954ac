# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""The very functions that a real libcuda gives to NVIDIA's CUDA runtimes are those that the probes are on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from agent.probes.symbols import SYMBOLS
from tests.unit.agent.probes.test_what_runtimes_ask_for import LISTS, PROBED

# Asks cuGetProcAddress for each line of its input, and prints those whose function is none of the named exports.
_ASK = """
import ctypes, sys
libcuda = ctypes.CDLL(sys.argv[1])
named = {ctypes.cast(getattr(libcuda, name), ctypes.c_void_p).value for name in sys.argv[2:] if hasattr(libcuda, name)}
for line in sys.stdin:
    name, version, *per_thread = line.split()
    flags, function, status = ctypes.c_uint64(2 if per_thread else 0), ctypes.c_void_p(), ctypes.c_int()
    arguments = name.encode(), ctypes.byref(function), int(version), flags, ctypes.byref(status)
    if libcuda.cuGetProcAddress_v2(*arguments) == 0 and function.value and function.value not in named:
        print(line.strip())
"""


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_each_form_of_a_probed_call_that_a_runtime_gets_is_probed(libcuda: Path, path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if line.split()[0] in PROBED]
    command = [sys.executable, "-c", _ASK, str(libcuda), *(symbol.name for symbol in SYMBOLS)]
    answer = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True, check=True)
    assert len(lines) > 100
    assert answer.stdout.splitlines() == []
