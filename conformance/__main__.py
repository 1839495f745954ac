# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance`: looks at everything, each item by itself, and reports. docs/on-a-real-gpu.md says what it is
for."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Final

from conformance import checks
from conformance.isolation import adopt_orphans
from conformance.machine_state import SIM_BUILD
from conformance.report.model import Verdict
from conformance.report.table import shower
from conformance.report.writer import NAME, Report, summary
from conformance.runner import Driver

LIMIT_SECONDS: Final = 450.0
WHERE: Final = "machine"  # looked at in any case: it says where the others were seen
_ENDS: Final = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_DOES: Final = (
    "Checks on this machine's GPU what GPU Warden takes for granted, and measures what it claims. Changes no setting "
    "of the GPU (clocks, power, MIG, compute mode) and ends whatever it starts. Probes and freezing need root; what "
    "cannot be had here is skipped and says why."
)
_EXITS: Final = (
    "exit status: 0 when nothing failed, 1 when a row says failed or no GPU was found, 2 for a wrong command line, "
    "129, 130 or 143 when ended by a signal (report.json then has what there was)"
)


class EndedBySignal(KeyboardInterrupt):
    """A class of its own, since CPython (3.11, run_eval_code_obj) kills the process with SIGINT at its end
    when a KeyboardInterrupt, and nothing derived from it, has left an exec() of text, also one that was caught."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def parser() -> argparse.ArgumentParser:
    """The parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python -m conformance", description=_DOES, epilog=f"items: {', '.join(checks.ORDER)}. {_EXITS}."
    )
    made.add_argument(
        "--out", type=Path, default=Path("gpu-report"), metavar="DIR", help="for report.json and log.txt (gpu-report)"
    )
    made.add_argument("--only", type=names, default=checks.ORDER, metavar="A,B", help=f"these items and {WHERE}")
    made.add_argument("--quick", action="store_true", help="repeat as little as possible: to see that everything works")
    made.add_argument("--simulated", action="store_true", help="on the simulated GPU, as `make sim` builds it")
    made.add_argument(
        "--limit-seconds",
        type=positive,
        default=LIMIT_SECONDS,
        metavar="S",
        help=f"items for which too little of it is left are skipped ({LIMIT_SECONDS:g})",
    )
    return made


def names(text: str) -> tuple[str, ...]:
    """Items, in the order of a run, and the one that says where it was."""
    given = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [word for word in given if word not in checks.ORDER]
    if unknown or not given:
        raise argparse.ArgumentTypeError(
            f"no item {', '.join(unknown) or 'named'}; there are {', '.join(checks.ORDER)}"
        )
    return tuple(name for name in checks.ORDER if name in (WHERE, *given))


def positive(text: str) -> float:
    """Seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    given = parser().parse_args(argv)
    if given.simulated and not (SIM_BUILD / "bin" / "gpusim").exists():
        return _refused(f"no simulated GPU in {SIM_BUILD}: run `make sim`")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
        log = (given.out / "log.txt").open("wb")
    except OSError as error:
        return _refused(f"{error.filename}: {error.strerror}; name another folder with --out")
    with log:
        try:
            return _run(given, log)
        finally:
            _let_stdout_go()


def _run(given: argparse.Namespace, log: IO[bytes]) -> int:
    for number in _ENDS:
        # A shell has what it starts in the background ignore SIGINT; nohup means it when it has SIGHUP ignored.
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, end_by_signal)
    adopt_orphans()
    report = Report(given.simulated, given.quick)
    with tempfile.TemporaryDirectory(prefix="gwgpu-", ignore_cleanup_errors=True) as folder:
        driver = Driver(report, Path(folder), given.out, log, shower(sys.stdout))
        try:
            driver.run(given.only, given.limit_seconds)
        except EndedBySignal as interrupted:
            print(f"gpu: ended early; what there was is in {report.write(given.out)}", file=sys.stderr)
            return 128 + interrupted.number
    with contextlib.suppress(OSError, ValueError):
        print(f"{report.source}: {summary(report.rows)}. {given.out / NAME}")
    if "GPU" not in report.machine():
        print("gpu: no GPU was found; the rows of the item machine say why", file=sys.stderr)
        return 1
    return 1 if report.counts()[Verdict.FAILED] else 0


def end_by_signal(number: int, _frame: FrameType | None) -> None:
    """Once: Ctrl-C reaches this process and the script that started it, which passes it on."""
    for one in _ENDS:
        signal.signal(one, signal.SIG_IGN)
    raise EndedBySignal(number)


def _let_stdout_go() -> None:
    """A reader that has gone is no failure, and the interpreter would make one of it at its end."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused(why: str) -> int:
    print(f"gpu: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
