# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The GPU Warden authors
"""`python -m conformance.isolation NAME --run FOLDER --rows-to DESCRIPTOR`: one item in a process of its own.

Owns an item's Host and its time limit. Rows are lines of JSON, written as they come. Whatever ends the item (its limit,
SIGTERM, the driver's death), each process that it started ends, and its scratch folder is removed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Final

from conformance import checks, process_tree
from conformance.host import Host, Unavailable, path_with_control
from conformance.machine_state import ROOT, SIM_BUILD, MachineState, item_environment, state_from_json
from conformance.report.model import Row, blamed, failed, row_from, skipped

PYTHON_VARIABLE: Final = "GPUWARDEN_GPU_PYTHON"
STATE_FILE: Final = "machine-state.json"  # in the run's folder
WHOLE: Final = "the whole item"  # the `what` of a row about no part of it
_PR_SET_PDEATHSIG: Final = 1
RUN_VARIABLE: Final = "GPUWARDEN_GPU_RUN"
_PR_SET_CHILD_SUBREAPER: Final = 36
_CLEANING_SECONDS: Final = 8.0  # for an item that is asked to end to undo what it did
_DYING_SECONDS: Final = 5.0  # of what was killed: in the kernel, it may hang for ever
_STEP_SECONDS: Final = 0.05
_MOST_ROW_BYTES: Final = 1 << 16


@contextmanager
def prepared_host(state: MachineState, folder: Path, *, quick: bool, seconds: float) -> Iterator[Host]:
    """An item's host. `folder` is made, and removed in the end; where simulated, the item's own GPU is in it."""
    folder.mkdir(parents=True)
    try:
        with ExitStack() as stack:
            node, environment = _node(stack, folder) if state.simulated else (None, {})
            environment = {**environment, **item_environment(state), "PATH": path_with_control()}
            os.environ.update(environment)  # for what the item itself loads
            host = Host(
                simulated=state.simulated,
                quick=quick,
                folder=folder,
                libcuda=_path(state.libcuda),
                libnvml=_path(state.libnvml),
                workloads=SIM_BUILD / "bin",
                bpf_objects=ROOT / "bpf" / "build",
                bpf=state.bpf,
                python=os.environ.get(PYTHON_VARIABLE) or sys.executable,
                environment=environment,
                node=node,
                seconds=seconds,
            )
            stack.callback(host.end_all)
            yield host
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _node(stack: ExitStack, folder: Path) -> tuple[Any, Mapping[str, str]]:
    from tools.harness.node import simulated_node

    node = stack.enter_context(simulated_node(folder / "gpu"))
    return node, node.environment


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def perform(name: str, state: MachineState, folder: Path, *, quick: bool, seconds: float) -> Iterator[Row]:
    """Rows of an item; what stops it is its last one."""
    try:
        with prepared_host(state, folder, quick=quick, seconds=seconds) as host:
            yield from checks.item(name).rows(host)
    except Unavailable as why:
        yield skipped(name, WHOLE, str(why))
    except Exception as error:  # noqa: BLE001 - an item may break in any way, and the others go on
        traceback.print_exc()
        yield failed(name, WHOLE, blamed(error))


def main(argv: list[str] | None = None) -> int:
    """0 also where the item failed: its rows say so."""
    parser = argparse.ArgumentParser(
        prog="python -m conformance.isolation", description="One item; `python -m conformance` runs them all."
    )
    parser.add_argument("name", choices=checks.ORDER, metavar="NAME")
    parser.add_argument("--run", type=Path, required=True, metavar="FOLDER", help=f"with {STATE_FILE} in it")
    parser.add_argument("--rows-to", type=int, default=1, metavar="DESCRIPTOR", help="default: standard output")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="that it has")
    given = parser.parse_args(argv)
    _end_with_the_driver()
    signal.signal(signal.SIGTERM, _leave)
    state = state_from_json((given.run / STATE_FILE).read_text())
    write = _writer(given.rows_to)
    for row in perform(given.name, state, given.run / given.name, quick=given.quick, seconds=given.seconds):
        write(row)
    return 0


def _writer(descriptor: int) -> Callable[[Row], None]:
    os.set_inheritable(descriptor, False)

    def write(row: Row) -> None:
        try:
            line = row.as_json()
        except (TypeError, ValueError) as error:  # no number, or none that JSON has
            line = failed(row.item, row.what, f"{error}: {row.figure!r}, against {row.baseline!r}").as_json()
        os.write(descriptor, f"{line}\n".encode())

    return write


def _leave(number: int, _frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _end_with_the_driver() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class ItemRunner:
    """How items are run. `folder` is the run's own: it is the value of a variable by which what they began is found.

    `adopting`: this process adopts orphans (adopt_orphans) and has no children but items, so all below it is theirs.
    """

    folder: Path
    log: IO[bytes]  # what they print
    environment: Mapping[str, str]
    quick: bool
    adopting: bool = False
    program: Sequence[str] = (sys.executable, "-m", "conformance.isolation")
    _stuck: set[process_tree.Process] = field(default_factory=set)  # they do not die; reported, and waited for, once

    def rows(self, name: str, seconds: float) -> Generator[Row, None, None]:
        """Ends within `seconds` and some more for the cleaning, which closing it does too."""
        reading, writing = os.pipe()
        try:
            process = self._start(name, writing, seconds)
        finally:
            os.close(writing)
        whats: set[str] = set()
        stuck_before = set(self._stuck)
        try:
            deadline = time.monotonic() + seconds
            for line in _lines(reading, process, deadline):
                yield _checked(name, line, whats)
            if process.poll() is None:
                yield failed(name, WHOLE, f"not done within its {seconds:g} s: ended")
            elif process.returncode:
                yield failed(name, WHOLE, f"ended with {_said(process.returncode)}; the log has what it printed")
        finally:
            os.close(reading)
            _ask(process)
            left = self.sweep(process)
            stuck = [process_tree.name(one) for one in sorted(self._stuck - stuck_before)]
        if stuck:
            yield failed(name, "what is killed dies", f"does not die, hangs in the kernel: {', '.join(stuck)}")
        if left and process.returncode == 0:
            yield failed(name, "nothing is left running", f"it left processes, which were ended: {', '.join(left)}")

    def sweep(self, process: subprocess.Popen[bytes] | None = None) -> list[str]:
        """Ends all that was begun in this run, the item's own process too. Returns the names of the others."""
        found = self._begun(process)
        names = [process_tree.name(one) for one in found if process is None or one.pid != process.pid]
        with _unfrozen(found):
            self._stuck.update(process_tree.end(found))
        if process is not None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_DYING_SECONDS)
        _reap(found)
        return [name for name in names if name]

    def _begun(self, process: subprocess.Popen[bytes] | None) -> list[process_tree.Process]:
        roots = [os.getpid()] if self.adopting else []
        if process is not None and (process.poll() is None or not Path(f"/proc/{process.pid}").exists()):
            roots.append(process.pid)  # its session keeps the number, unless another process has it
        below = (one for root in roots for one in process_tree.descendants(root))
        return sorted({*below, *process_tree.with_variable(f"{RUN_VARIABLE}={self.folder}")} - self._stuck)

    def _start(self, name: str, writing: int, seconds: float) -> subprocess.Popen[bytes]:
        command = [*self.program, name, "--run", str(self.folder), "--rows-to", str(writing), "--seconds", str(seconds)]
        self.log.write(f"\n== {name}\n".encode())
        self.log.flush()
        return subprocess.Popen(
            [*command, *(["--quick"] if self.quick else [])],
            env={**os.environ, **self.environment, RUN_VARIABLE: str(self.folder), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            cwd=ROOT,
            pass_fds=[writing],
            start_new_session=True,
        )


def adopt_orphans() -> None:
    """What loses its parent becomes this process's child, not that of the first process: so daemons are found too."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _lines(reading: int, process: subprocess.Popen[bytes], deadline: float) -> Iterator[bytes]:
    """Until the process has ended, or the time is over. A child of it may hold the pipe: its end says nothing."""
    rest = b""
    while True:
        ended = process.poll() is not None
        while select.select([reading], [], [], 0 if ended else _STEP_SECONDS)[0]:
            given = os.read(reading, _MOST_ROW_BYTES)
            *lines, rest = (rest + given).split(b"\n")
            yield from lines
            if not given or time.monotonic() > deadline:
                break
        if ended or time.monotonic() > deadline:
            return
        if process.poll() is None:
            time.sleep(_STEP_SECONDS)  # the pipe was closed too early, or is quiet


def _checked(name: str, line: bytes, whats: set[str]) -> Row:
    try:
        row = row_from(json.loads(line))
    except (ValueError, TypeError, KeyError) as error:
        return failed(name, WHOLE, f"what it wrote is no row ({error}): {line[:200].decode(errors='replace')}")
    if row.item != name or row.what in whats:
        return failed(name, row.what, "the item's own mistake: a row of another item, or one that was there before")
    whats.add(row.what)
    return row


def _said(status: int) -> str:
    if status < 0:
        return f"signal {signal.Signals(-status).name}"
    return f"exit status {status}"


@contextmanager
def _unfrozen(processes: Iterable[process_tree.Process]) -> Iterator[None]:
    """The control groups with our name that they were put into are thawed, for what is frozen does not end, and go."""
    from tools.harness import cgroups

    paths = {path for one in processes for path in _groups(one.pid)}.difference(_groups(os.getpid()))
    for path in paths:
        with suppress(OSError):  # it was removed meanwhile
            cgroups.thaw(path)
    yield
    for path in paths:
        cgroups.remove(path, ())


def _groups(pid: int) -> Iterator[str]:
    """In every hierarchy the first one on the way to it, below the root."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            first = line.partition("/")[2].partition("/")[0]
            if first.startswith("gpuwarden-"):
                yield f"/{first}"


def _ask(process: subprocess.Popen[bytes]) -> None:
    """Asks the item to end and to undo what it did; it may have been stopped."""
    if process.poll() is not None:
        return
    for number in (signal.SIGCONT, signal.SIGTERM):
        process.send_signal(number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_CLEANING_SECONDS)


def _reap(ended: Sequence[process_tree.Process]) -> None:
    """Waits for those of them that this process has adopted."""
    for process in ended:
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG)


if __name__ == "__main__":
    sys.exit(main())
