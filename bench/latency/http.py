# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m bench http`: what the probes of the signal `http` cost a system call of a process that is none of theirs.

It holds when a call that does nothing takes no more than MOST_ADDED_NS longer while they are attached: a call that
does something takes longer by as much. Rounds with and without follow each other, and the best of each count, so that
what else runs on the machine weighs on both alike.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from agent.node import preflight
from enforce.signals.http_probe import HttpProbes

MOST_ADDED_NS = 1000.0
KINDS = ("does nothing", "fails", "moves 64 bytes")
_ROUNDS = 7


@contextmanager
def _caller(calls: int) -> Iterator[tuple[IO[str], IO[str]]]:
    """The program's stdin and stdout."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "http"
        subprocess.run(["gcc", "-O2", "-o", str(program), str(Path(__file__).with_suffix(".c"))], check=True)
        pipe = subprocess.PIPE
        with subprocess.Popen([program, str(calls)], stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdin
            assert process.stdout
            yield process.stdin, process.stdout


def _round(caller: tuple[IO[str], IO[str]]) -> list[float]:
    """Measures ns per call, by kind."""
    caller[0].write("go\n")
    caller[0].flush()
    return [float(word) for word in caller[1].readline().split()]


def measure(rounds: int, calls: int) -> tuple[list[float], list[float]]:
    """Measures ns per call, by kind: without the probes, and with them."""
    without, attached = [], []
    with _caller(calls) as caller:
        for _ in range(rounds):
            without.append(_round(caller))
            with HttpProbes(preflight.bpf_object().with_name("http.bpf.o")):
                attached.append(_round(caller))
    return [min(column) for column in zip(*without, strict=True)], [
        min(column) for column in zip(*attached, strict=True)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 when an unrelated call is hardly slower."""
    parser = argparse.ArgumentParser(prog="python -m bench.latency.http")
    parser.add_argument("--calls", type=int, default=200_000, metavar="N", help="of each kind in each round")
    without, attached = measure(_ROUNDS, parser.parse_args(arguments).calls)
    for kind, before, after in zip(KINDS, without, attached, strict=True):
        print(f"a call that {kind:<15} {before:6.0f} ns, with the probes {after:6.0f} ns: {after / before:.2f} times")
    return 0 if attached[0] - without[0] <= MOST_ADDED_NS else 1


if __name__ == "__main__":
    raise SystemExit(main())
