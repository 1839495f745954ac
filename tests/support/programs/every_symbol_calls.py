# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""every_symbol.c, a program that calls every probed symbol as often as planned, and its report of what it did."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from agent.probes.symbols import SYMBOLS

_HERE = Path(__file__).parent
_INCLUDE = _HERE.parents[2] / "sim" / "include"
_PRIMES = [n for n in range(2, 180) if all(n % d for d in range(2, int(n**0.5) + 1))]


def build(path: Path) -> Path:
    """Compiles it; the libcuda.so.1 that it calls is looked up at run time."""
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-g", "-O1", f"-I{_INCLUDE}"]
    subprocess.run(["gcc", *flags, str(_HERE / "every_symbol.c"), "-o", str(path), "-lpthread"], check=True)
    return path


def plan_of(names: Sequence[str]) -> dict[str, int]:
    """A prime number of calls for each; small ones where contexts end, for that takes longest."""
    ordered = sorted(names, key=lambda name: "Ctx" not in name)
    return {name: _PRIMES[number % len(_PRIMES)] for number, name in enumerate(ordered)}


def prepare(stdin: IO[str], stdout: IO[str], plan: Mapping[str, int]) -> None:
    """Returns when it has made no call yet."""
    stdin.write("".join(f"{name} {count}\n" for name, count in plan.items()) + "\n")
    stdin.flush()
    assert stdout.readline() == "ready\n"


def carry_out(stdin: IO[str], stdout: IO[str]) -> Any:
    """What it did. Until its stdin is closed it lives on."""
    stdin.write("go\n")
    stdin.flush()
    return json.loads(stdout.readline())


def reported(report: Any) -> dict[str, int]:
    """Calls by symbol: those that were planned, and those that these needed besides."""
    calls = {name: symbol["calls"] for name, symbol in report["symbols"].items()}
    for name, count in report["setup"].items():
        calls[name] = calls.get(name, 0) + count
    probed = {symbol.name for symbol in SYMBOLS}
    return {name: count for name, count in calls.items() if count and name in probed}


def grown(after: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """What was added to each count that changed."""
    return {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
