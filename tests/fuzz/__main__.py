# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m tests.fuzz` (`make fuzz`): inputs from outside, made up by libFuzzer along the branches that they take.

One process per target, one after another: atheris for those in Python, clang's own fuzzer with sanitizers for the
kernel's parser of HTTP. What one finds is in build/fuzz/TARGET, beside the inputs that took new branches, where the
next run goes on. Exit code 1 where there was a fault.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tests.fuzz.target import CORPUS

ROOT: Final = Path(__file__).parents[2]
WORK: Final = ROOT / "build" / "fuzz"
HTTP_STREAM: Final = "http_stream"
_HANG_SECONDS: Final = 20
"""Of real time, for what takes no CPU time; a second of CPU is judged by the worker"""
_MOST_RSS_MIB: Final = 2048
_LONGEST_BYTES: Final = 16 << 10
_FIGURE: Final = re.compile(r"^stat::(\w+): +(\d+)$", re.MULTILINE)
_FOUND: Final = re.compile(r"Test unit written to (\S+)")
_FLAGS: Final = (
    "-g",
    "-O1",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fno-sanitize-recover=all",
    "-Ibpf",
    "-Itests/support/programs",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one target. None: libFuzzer has not said so."""

    target: str
    inputs: int | None
    seconds: int
    new_inputs: int | None
    peak_mib: int | None
    faults: tuple[str, ...]
    """Files with the inputs"""


@dataclass(frozen=True, slots=True)
class Amount:
    """How much of each target; 0 seconds: as long as it takes."""

    runs: int
    seconds: int
    seed: int


def outcome_of(target: str, status: int, seconds: float, said: str) -> Outcome:
    """Out of what libFuzzer printed. A status that is not 0 is a fault, with or without a file."""
    figures: Mapping[str, int] = {name: int(value) for name, value in _FIGURE.findall(said)}
    faults = tuple(_FOUND.findall(said))
    return Outcome(
        target,
        figures.get("number_of_executed_units"),
        round(seconds),
        figures.get("new_units_added"),
        figures.get("peak_rss_mb"),
        faults or (("no input was written",) if status else ()),
    )


def names() -> list[str]:
    """All targets: those that have a corpus."""
    return sorted(path.name for path in CORPUS.iterdir())


def fuzz(target: str, amount: Amount) -> Outcome:
    """Runs one target; its log is build/fuzz/TARGET.log."""
    folder = WORK / target
    (folder / "inputs").mkdir(parents=True, exist_ok=True)
    limits = [f"-runs={amount.runs}", f"-max_total_time={amount.seconds}", f"-seed={amount.seed}"]
    limits += [f"-timeout={_HANG_SECONDS}", f"-rss_limit_mb={_MOST_RSS_MIB}", f"-max_len={_LONGEST_BYTES}"]
    where = [f"-artifact_prefix={folder}/", "-print_final_stats=1", str(folder / "inputs"), str(CORPUS / target)]
    log = folder.with_suffix(".log")
    command = [*_command(target), *limits, *where]
    began = time.monotonic()
    with log.open("wb") as out:
        status = subprocess.run(command, cwd=ROOT, stdout=out, stderr=out).returncode
    return outcome_of(target, status, time.monotonic() - began, log.read_text(errors="replace"))


def _command(target: str) -> Sequence[str]:
    if target != HTTP_STREAM:
        return (sys.executable, "-m", "tests.fuzz.worker", target)
    program = WORK / HTTP_STREAM / "program"
    program.parent.mkdir(parents=True, exist_ok=True)
    sanitizers = ("-fsanitize=address,undefined,fuzzer", "-DFUZZING_BUILD_MODE_UNSAFE_FOR_PRODUCTION")
    subprocess.run(["clang", *_FLAGS, *sanitizers, f"tests/fuzz/{HTTP_STREAM}.c", "-o", program], cwd=ROOT, check=True)
    return (str(program),)


def table(outcomes: Sequence[Outcome]) -> str:
    """A line per target."""
    lines = [f"{'target':<14}{'inputs':>12}{'seconds':>9}{'new':>7}{'peak MiB':>10}  faults"]
    for one in outcomes:
        inputs, new, peak = (
            "–" if value is None else f"{value:,}" for value in (one.inputs, one.new_inputs, one.peak_mib)
        )
        faults = ", ".join(one.faults) or "none"
        lines.append(f"{one.target:<14}{inputs:>12}{one.seconds:>9,}{new:>7}{peak:>10}  {faults}")
    return "\n".join(lines)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=100_000, metavar="N", help="inputs per target (%(default)s)")
    parser.add_argument("--seconds", type=int, default=0, metavar="S", help="at most so long per target (no limit)")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer's random numbers (%(default)s)")
    parser.add_argument("--targets", default="", metavar="A,B", help=f"of {', '.join(names())} (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there as JSON, too")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Exit code: 0 when nothing was found."""
    options = _options(arguments)
    wanted = options.targets.split(",") if options.targets else names()
    if unknown := sorted(set(wanted) - set(names())):
        print(f"make fuzz: no target {', '.join(unknown)}; there are {', '.join(names())}", file=sys.stderr)
        return 2
    if find_spec("atheris") is None:
        print("make fuzz: atheris is missing: pip install --editable '.[fuzz]'", file=sys.stderr)
        return 2
    outcomes = []
    for target in wanted:
        outcomes.append(fuzz(target, Amount(options.runs, options.seconds, options.seed)))
        print(table(outcomes).splitlines()[-1] if len(outcomes) > 1 else table(outcomes), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=2) + "\n")
    return 1 if any(one.faults for one in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
